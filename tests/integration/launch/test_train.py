"""``tp train`` with options of ``tp launch``: the ranks that it starts, and what it refuses."""

import os
import subprocess
import sys

import pytest
import yaml
from tp_trainer.loggers import read_run

from tests.run_tp import run

SCRIPT = """
from pathlib import Path
import torch
from tp_trainer import Trainer

def main(width: int): ...

def train(folder: Path, lr: float = 0.1, steps: int = 3, log: list[str] | None = None):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    data = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
    with Trainer(devices="cpu", seed=0, progress=False) as trainer:
        return trainer.fit(
            model, optimizer, data, step=lambda model, batch: model(batch).square().mean(),
            max_steps=steps, checkpoint=folder, log=log,
        )
"""


@pytest.fixture(autouse=True)
def script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "PET_NPROC_PER_NODE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "values_script.py").write_text(SCRIPT)
    yield
    sys.modules.pop("values_script", None)


def test_options_of_launching_are_checked_by_the_launcher(capsys):
    assert run(["train", "-n", "0", "values_script.py:main", "--width", "3"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "tp train: -n/--nproc-per-node must be 1 or more processes, or 'auto'; got '0'"


def test_a_rank_refuses_options_of_launching(monkeypatch, capsys):
    place = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "PET_NPROC_PER_NODE": "7", "PET_NNODES": "3"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    assert run(["train", "values_script.py:main", "--width", "3"]) == 0
    assert run(["train", "-n", "2", "--log-dir", "logs", "values_script.py:main", "--width", "3"]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "was given --log-dir, --nproc-per-node in rank 0 of 1" in said


@pytest.mark.slow
def test_several_ranks_get_the_same_values(tmp_path):
    (tmp_path / "run.yaml").write_text("folder: run\nlr: 0.5\nlog: [jsonl]\n")
    command = [sys.executable, "-m", "tp_core.cli", "train", "-n", "2", "values_script.py:train"]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("PET_")}
    done = subprocess.run(
        [*command, "--config", "run.yaml", "--steps", "2"],
        cwd=tmp_path, env=environ, capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    chosen = read_run(tmp_path / "run").info["hyperparameters"]
    assert (chosen["lr"], chosen["steps"], chosen["world_size"]) == (0.5, 2, 2)
    assert yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())["steps"] == 2
