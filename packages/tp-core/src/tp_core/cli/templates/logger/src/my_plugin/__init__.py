"""A logger for tp: one JSON object for each row of numbers.

tp loads this module with all other plugins at its first question, so it imports what is heavy
in functions only.
"""

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, ClassVar

from tp_core.errors import ConfigError
from tp_core.plugins import Logger, LoggerFactory, RunInfo, RunStatus, hookimpl

tp_contract = 1


class MyPluginLogger(Logger):
    """Writes "hyperparameters" into the first line, and "step", "epoch", "numbers" into the others.

    Args:
        path: The file; by default ``my-plugin.jsonl`` in the folder of the run's checkpoints.
    """

    name: ClassVar[str] = "my-plugin"

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self._path = None if path is None else Path(path)
        self._file: IO[str] | None = None

    def open(self, info: RunInfo) -> None:
        """Begin the file; of a run that is resumed, drop the rows after its checkpoint.

        Raises:
            ConfigError: The run has no folder, and no path was given.
        """
        if self._path is None and info.folder is None:
            raise ConfigError("the run has no folder to write into; give MyPluginLogger a path")
        path = self._path or Path(info.folder or "", "my-plugin.jsonl")
        lines = [{"hyperparameters": dict(info.hyperparameters)}]
        if info.resumed and path.exists():
            rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
            lines = [row for row in rows if row.get("step", 0) <= info.step]
        part = path.with_name(path.name + ".part")  # whole, or not there
        part.write_text("".join(map(_line, lines)), encoding="utf-8")
        part.replace(path)
        self._file = path.open("a", encoding="utf-8")

    def log(self, numbers: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Write a row."""
        if numbers and self._file is not None:
            self._file.write(_line({"step": step, "epoch": epoch, "numbers": dict(numbers)}))

    def flush(self) -> None:
        """Hand the rows to the system: others can read them."""
        if self._file is not None:
            self._file.flush()

    def state_dict(self) -> dict[str, Any]:
        """Write the rows out: a run that resumes from a checkpoint needs those before it."""
        self.flush()
        return {}

    def close(self, status: RunStatus) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _line(row: Mapping[str, Any]) -> str:
    return json.dumps(row, default=str) + "\n"


@hookimpl
def tp_loggers() -> Iterable[LoggerFactory]:
    """Bring the logger, by name."""
    return [LoggerFactory("my-plugin", "Writes rows into my-plugin.jsonl.", MyPluginLogger)]
