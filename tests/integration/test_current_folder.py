"""Commands in a folder with a module for every name of Python's own: none of them runs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tp_commands import COMMANDS

PROGRAM = """
import torch
from torch import nn
from tp_trainer import Trainer


def build():
    return {"model": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)), "batch": torch.randn(2, 4)}


def train(folder: str):
    model = nn.Linear(2, 1)
    data = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2, num_workers=1)
    with Trainer(devices="cpu", progress=False) as trainer:
        optimizer = torch.optim.SGD(model.parameters())
        step = lambda model, batch: model(batch).square().mean()
        trainer.fit(model, optimizer, data, step=step, epochs=1, checkpoint=folder, log="jsonl")


def work(item):
    return item
"""

# In this order: some need what others leave. For `verify` a script that ends at once is enough: ranks start.
CALLS = {
    "doctor": ["--ranks", "2"],
    "explain": ["ConfigError"],
    "train": ["{there}/program.py:train", "--folder", "{there}/run"],
    "report": ["{there}/run"],
    "convert": ["{there}/run", "{there}/model.safetensors"],
    "estimate": ["{there}/program.py:build", "--devices", "2", "--memory", "1GiB"],
    "shard verify": ["{there}/program.py:build"],
    "data index": ["{there}/a.txt"],
    "data look": ["{there}/a.txt"],
    "data order": ["{there}/a.txt", "--batch", "2"],
    "run": ["{there}/program.py:work", "--input", "{there}/a.txt", "--output", "{there}/out.jsonl"],
    "launch": ["-n", "2", "{there}/nothing.py"],
    "launch --detach": ["-n", "1", "{there}/nothing.py"],
    "logs": ["last", "-f"],
    "jobs": [],
    "stop": ["last"],
    "new-plugin": ["backend", "mine", "--into", "{there}"],
    "verify": ["{there}/ends.py"],
}
FAILS = {"verify"}


@pytest.mark.slow
@pytest.mark.takes(150)
def test_no_command_runs_modules_of_the_current_folder(tmp_path):
    here, there, ran = tmp_path / "here", tmp_path / "there", tmp_path / "ran"
    for folder in (here, there):
        folder.mkdir()
    for name in sys.stdlib_module_names:
        (here / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r} + ' ')\n")
    (there / "program.py").write_text(PROGRAM)
    (there / "nothing.py").touch()
    (there / "ends.py").write_text("raise SystemExit(3)\n")
    (there / "a.txt").write_text("a\nb\nc\n")
    assert {*CALLS} - {"launch --detach"} == {*COMMANDS}
    environ = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONSAFEPATH"}}
    environ["TP_STATE_DIR"] = str(there / "state")
    foreign, failed = {}, {}
    for command, words in CALLS.items():
        done = subprocess.run(
            [Path(sys.executable).with_name("tp"), *command.split(), *(w.format(there=there) for w in words)],
            cwd=here,
            env=environ,
            capture_output=True,
            text=True,
            timeout=600,
            check=False,
        )
        if ran.exists():
            foreign[command] = ran.read_text()
            ran.unlink()
        if (done.returncode == 0) == (command in FAILS):
            failed[command] = done.stderr or done.stdout
    assert foreign == {}
    assert failed == {}


@pytest.mark.slow
def test_neither_does_a_function_that_is_launched(tmp_path):
    ran = tmp_path / "ran"
    (tmp_path / "here").mkdir()
    for name in sys.stdlib_module_names:
        (tmp_path / "here" / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write({name!r} + ' ')\n")
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nimport tp_launch\nprint(tp_launch.launch(os.getenv, 2, 'PYTHONSAFEPATH'))\n"
    )
    done = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path / "here",
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.endswith("[None, None]\n"), done.stderr
    assert not ran.exists(), ran.read_text()


@pytest.mark.slow
def test_what_a_rank_starts_has_the_usual_path(tmp_path):
    """The variable that keeps the folder away is of the start of the rank alone."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os\nfrom tp_core.ranks import run_ranks\nif __name__ == '__main__':\n"
        "    print(run_ranks(os.getenv, 2, 'PYTHONSAFEPATH'), os.getenv('PYTHONSAFEPATH'))\n"
    )
    done = subprocess.run(
        [sys.executable, program], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.stdout == "[None, None] None\n", done.stderr
