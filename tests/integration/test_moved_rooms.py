"""What only a hook reaches is moved, unchanged, into a distribution of its own: it is found, and works."""

import ast
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

PACKAGES = Path(__file__).parents[2] / "packages"

SCRIPT = """
import torch
from tp_trainer import Trainer

def main(lr: float = 0.1, log: str | None = None):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    with Trainer(devices="cpu", progress=False) as trainer:
        print("trained with", lr)
        trainer.fit(
            model, optimizer, [torch.ones(4, 2)], step=lambda model, batch: model(batch).square().mean(),
            checkpoint="run", log=log,
        )

def double(x):
    return 2 * int(x)

if __name__ == "__main__":
    main()
"""


class Site:
    """Packages that are found before the installed ones: one without a room, and the room's own one.

    Args:
        folder: An empty folder.
        package: The package.
        room: The path of the room in it.
        hooks: The plugin module of the new distribution.
        listed: What stands beside the room in the lists of the package's own plugin module.
    """

    def __init__(self, folder, package, room, hooks, listed):
        self.folder, self.path = folder, folder / "site"
        source = PACKAGES / package.replace("_", "-") / "src" / package
        shutil.copytree(source, self.path / package, ignore=shutil.ignore_patterns("__pycache__"))
        old = self.path / package / room
        new = self.path / f"moved_{old.stem.lstrip('_')}{old.suffix}"
        old.rename(new)
        name = f"{package}.{room.removesuffix('.py').replace('/', '.')}"
        for file in (
            [new] if new.is_file() else new.glob("*.py")
        ):  # a room names itself to import its own files
            file.write_text(file.read_text().replace(name, new.stem))
        plugin = self.path / package / "_plugin.py"
        tree = Without(listed).visit(ast.parse(plugin.read_text()))
        plugin.write_text(ast.unparse(tree))
        (self.path / "moved_plugin.py").write_text(f"tp_contract = 1\nfrom tp_core.plugins import *\n{hooks}")
        info = self.path / "moved-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: moved\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[tp.plugins]\nmoved = moved_plugin\n")
        (folder / "script.py").write_text(SCRIPT)

    def tp(self, *words):
        environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(self.path), *filter(None, sys.path)])}
        environ |= {"TP_STATE_DIR": str(self.folder / "state")}
        command = [sys.executable, "-m", "tp_core.cli", *map(str, words)]
        done = subprocess.run(
            command, cwd=self.folder, env=environ, capture_output=True, text=True, timeout=800, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


class Without(ast.NodeTransformer):
    """Leaves a room out of the lists that a package's hooks return."""

    def __init__(self, listed):
        self.listed = listed

    def visit_List(self, node):
        node.elts = [entry for entry in node.elts if self.listed not in ast.unparse(entry)]
        return node


@pytest.mark.slow
def test_jobs_in_the_background(tmp_path):
    hooks = """
@hookimpl
def tp_commands():
    import moved_jobs as room
    return [Command(name, "", getattr(room, f"{name}_app")) for name in ("jobs", "logs", "stop")]
"""
    site = Site(tmp_path, "tp_trainer", "_jobs.py", hooks, "'_jobs'")
    name = site.tp("launch", "--detach", "-n", "1", "script.py").strip()
    assert "trained with 0.1" in site.tp("logs", "-f", name)
    deadline = time.monotonic() + 800
    while (job := json.loads(site.tp("jobs", "--json"))[0])["state"] == "running":
        assert time.monotonic() < deadline
    assert (job["id"], job["state"], job["status"]) == (name, "finished", 0)


@pytest.mark.nightly
def test_a_function_with_values(tmp_path):
    hooks = """
@hookimpl
def tp_commands():
    from moved_train import train_app
    return [Command("train", "", train_app)]
"""
    site = Site(tmp_path, "tp_trainer", "_train.py", hooks, "'_train'")
    assert "[rank0] trained with 0.5" in site.tp("train", "-n", "1", "script.py:main", "--lr", "0.5")
    assert "lr: 0.5" in (tmp_path / "run" / "config.yaml").read_text()


@pytest.mark.slow
@pytest.mark.needs("tensorboard")
def test_a_logger_of_others(tmp_path):
    hooks = """
@hookimpl
def tp_loggers():
    def make():
        from moved_tensorboard import TensorBoardLogger
        return TensorBoardLogger()
    return [LoggerFactory("tensorboard", "", make)]
"""
    site = Site(tmp_path, "tp_trainer", "loggers/_tensorboard.py", hooks, "_tensorboard'")
    site.tp("train", "script.py:main", "--log", "tensorboard")
    assert list((tmp_path / "run" / "tensorboard").glob("events.out.tfevents.*"))


@pytest.mark.nightly
def test_a_batch_of_items(tmp_path):
    hooks = """
@hookimpl
def tp_commands():
    def load():
        from moved_command import app
        return app
    return [Command("run", "", load)]
"""
    site = Site(tmp_path, "tp_runner", "_command", hooks, "_load_run")
    (tmp_path / "in.txt").write_text("1\n2\n")
    site.tp("run", "script.py:double", "--input", "in.txt", "--output", "out.jsonl", "--devices", "1")
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["result"] for row in rows] == [2, 4]
