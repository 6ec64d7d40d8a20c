"""The logger does what every logger must do, and its rows can be read."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from tp_core.errors import ConfigError
from tp_core.plugins import Logger, RunInfo
from tp_core.testing import LoggerConformance, PluginConformance

from my_plugin import MyPluginLogger


class TestPlugin(PluginConformance):
    plugin = "my_plugin"
    brings = {"logger": ("my-plugin",)}


class TestLogger(LoggerConformance):
    def make(self, folder: Path) -> Logger:
        return MyPluginLogger(folder / "numbers.jsonl")

    def read(self, folder: Path) -> dict[str, list[tuple[int, float]]]:
        found: dict[str, list[tuple[int, float]]] = {}
        for row in rows(folder / "numbers.jsonl"):
            for name, value in row.get("numbers", {}).items():
                found.setdefault(name, []).append((row["step"], value))
        return found

    def read_hyperparameters(self, folder: Path) -> Mapping[str, Any] | None:
        first: dict[str, Any] = rows(folder / "numbers.jsonl")[0]["hyperparameters"]
        return first


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_it_writes_into_the_folder_of_the_run(tmp_path: Path) -> None:
    logger = MyPluginLogger()
    logger.open(RunInfo(folder=tmp_path))
    logger.log({"loss": 0.5}, step=1, epoch=1)
    logger.close("finished")
    assert rows(tmp_path / "my-plugin.jsonl")[1]["numbers"] == {"loss": 0.5}


def test_a_run_without_a_folder_is_refused_before_it_begins() -> None:
    with pytest.raises(ConfigError, match="give MyPluginLogger a path"):
        MyPluginLogger().open(RunInfo())
