"""Commands in a folder with a module for every name of Python's own: none of them runs."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
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

# Side by side, but each line in its order: some commands need what others leave. For `verify` a script that
# ends at once is enough: ranks start.
CALLS = [
    {
        "train": ["{there}/program.py:train", "--folder", "{there}/run"],
        "report": ["{there}/run"],
        "convert": ["{there}/run", "{there}/model.safetensors"],
    },
    {
        "launch --detach": ["-n", "1", "{there}/nothing.py"],
        "logs": ["last", "-f"],
        "jobs": [],
        "stop": ["last"],
    },
    {"doctor": ["--ranks", "2"]},
    {"verify": ["{there}/ends.py"]},
    {"launch": ["-n", "2", "{there}/nothing.py"]},
    {"shard verify": ["{there}/program.py:build"]},
    {"estimate": ["{there}/program.py:build", "--devices", "2", "--memory", "1GiB"]},
    {"run": ["{there}/program.py:work", "--input", "{there}/a.txt", "--output", "{there}/out.jsonl"]},
    {
        "data index": ["{there}/a.txt"],
        "data look": ["{there}/a.txt"],
        "data order": ["{there}/a.txt", "--batch", "2"],
    },
    {"explain": ["ConfigError"], "new-plugin": ["backend", "mine", "--into", "{there}"]},
]
FAILS = {"verify"}
N_SIDE_BY_SIDE = 3  # of two cores, where each waits for others now and then


@pytest.fixture(scope="module")
def here(tmp_path_factory):
    """Return a folder with the modules, which write their names to the file of the variable RAN."""
    folder = tmp_path_factory.mktemp("here")
    for name in sys.stdlib_module_names:
        text = f"import os\nopen(os.environ['RAN'], 'a').write({name!r} + ' ')\n"
        (folder / f"{name}.py").write_text(text)
    return folder


def environ_of(ran, **more):
    kept = {k: v for k, v in os.environ.items() if k not in {"PYTHONPATH", "PYTHONSAFEPATH"}}
    return kept | {"RAN": str(ran), **more}


@pytest.mark.slow
@pytest.mark.takes(70)
def test_no_command_runs_modules_of_the_current_folder(here, tmp_path):
    there, ran = tmp_path / "there", tmp_path / "ran"
    for folder in (there, ran):
        folder.mkdir()
    (there / "program.py").write_text(PROGRAM)
    (there / "nothing.py").touch()
    (there / "ends.py").write_text("raise SystemExit(3)\n")
    (there / "a.txt").write_text("a\nb\nc\n")
    assert {command for line in CALLS for command in line} - {"launch --detach"} == {*COMMANDS}
    failed = {}

    def call(line):
        for command, words in line.items():
            done = subprocess.run(
                [
                    Path(sys.executable).with_name("tp"),
                    *command.split(),
                    *(word.format(there=there) for word in words),
                ],
                cwd=here,
                env=environ_of(ran / command, TP_STATE_DIR=str(there / "state"), OMP_NUM_THREADS="1"),
                capture_output=True,
                text=True,
                timeout=800,
                check=False,
            )
            if (done.returncode == 0) == (command in FAILS):
                failed[command] = done.stderr or done.stdout

    with ThreadPoolExecutor(N_SIDE_BY_SIDE) as threads:
        list(threads.map(call, CALLS))
    assert {path.name: path.read_text() for path in ran.iterdir()} == {}
    assert failed == {}


@pytest.mark.slow
def test_neither_do_ranks_and_what_they_start_has_the_usual_path(here, tmp_path):
    """The variable that keeps the folder away is of the start of the rank alone."""
    program = tmp_path / "program.py"
    program.write_text(
        "import os, tp_launch\nfrom tp_core.ranks import run_ranks\nif __name__ == '__main__':\n"
        "    for start in (tp_launch.launch, run_ranks):\n"
        "        print(start(os.getenv, 2, 'PYTHONSAFEPATH'), os.getenv('PYTHONSAFEPATH'))\n"
    )
    ran = tmp_path / "ran"
    done = subprocess.run(
        [sys.executable, program],
        cwd=here,
        env=environ_of(ran),
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.stdout == "[None, None] None\n" * 2, done.stderr
    assert not ran.exists(), ran.read_text()
