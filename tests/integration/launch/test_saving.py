"""Signals end a job with its state saved, also where loaders have workers, whoever else hears them."""

import os
import signal
import sys

import pytest

from tests.own_words import own_words

# Notes each step that was done, as the checkpoint of the end has to be of the last one.
TRAIN = """
import os, random, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tp_trainer import Checkpoints, Trainer

class Noise(Dataset):
    def __init__(self, length):
        self.length = length

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        x = torch.rand(4) + random.random()
        return x, x.sum(0, keepdim=True)

def step(model, batch):
    time.sleep(0.02)
    loss = (model(batch[0]) - batch[1]).square().mean()
    if model.training and os.environ.get("RANK", "0") == "0":
        with open("steps", "a") as file:
            file.write(".")
    return loss

if __name__ == "__main__":
    options = {"num_workers": 2, "multiprocessing_context": sys.argv[1]}
    options["persistent_workers"] = sys.argv[2] == "persistent"
    with Trainer(devices="cpu", seed=3, progress=sys.stderr.isatty()) as trainer:
        model = nn.Linear(4, 1)
        trainer.fit(
            model,
            torch.optim.SGD(model.parameters(), 0.01),
            DataLoader(Noise(96), batch_size=8, **options),
            validation=DataLoader(Noise(16), batch_size=8, **options),
            step=step,
            epochs=10_000,
            checkpoint=Checkpoints("run", every_epochs=None),
        )
"""

_EPOCH = 12
_INTERRUPT = b"\x03"  # what Ctrl-C is to a terminal


def _is_training(tp, until):
    """Wait until workers have been started for training, validation, and training again."""
    path = tp.cwd / "steps"
    until(lambda: path.exists() and path.stat().st_size > _EPOCH + 2, timeout_s=800)


def _saved(tp):
    """The one checkpoint that there is, of the last step that was done."""
    (path,) = (tp.cwd / "run").glob("step-*")
    assert int(path.name.removeprefix("step-")) == (tp.cwd / "steps").stat().st_size
    return path


@pytest.mark.takes(60)
@pytest.mark.parametrize(
    ("number", "ranks", "method", "kept"),
    [
        pytest.param("SIGTERM", 1, "fork", "anew", id="term-1", marks=pytest.mark.nightly),
        pytest.param("SIGTERM", 2, "fork", "anew", id="term-2", marks=pytest.mark.nightly),
        pytest.param("SIGUSR1", 2, "spawn", "persistent", id="usr1-2", marks=pytest.mark.slow),
        pytest.param("SIGQUIT", 2, "forkserver", "anew", id="quit-2", marks=pytest.mark.nightly),
    ],
)
def test_a_launch_that_is_signalled_saves_and_says_so(tp, until, number, ranks, method, kept):
    process = tp.start("launch", "-n", str(ranks), tp.script(TRAIN), method, kept)
    _is_training(tp, until)
    process.send_signal(getattr(signal, number))
    _, err = process.communicate(timeout=800)
    assert process.returncode == 128 + getattr(signal, number)
    assert own_words(err).endswith(f"tp launch: stopped by {number}; saved: {_saved(tp)}\n")
    told = "SIGUSR1" if number == "SIGUSR1" else "SIGTERM"
    assert f"[rank0] {told}: the run ended after step" in err
    assert "Traceback" not in own_words(err)


@pytest.mark.slow
def test_a_launch_that_is_interrupted_in_a_terminal_saves(tp, until):
    process, terminal = tp.start_in_terminal(
        tp.command("launch", "-n", "1", tp.script(TRAIN), "fork", "persistent")
    )
    _is_training(tp, until)
    os.write(terminal, _INTERRUPT)
    shown = tp.read_terminal(terminal)
    assert process.wait(800) == 130
    assert f"tp launch: stopped by SIGINT; saved: {_saved(tp)}" in shown.replace("\r\n", "\n")


@pytest.mark.slow
def test_a_launch_whose_terminal_is_closed_saves(tp, until):
    process, terminal = tp.start_in_terminal(
        tp.command("launch", "-n", "1", tp.script(TRAIN), "fork", "anew")
    )
    _is_training(tp, until)
    os.close(terminal)
    assert process.wait(800) == 129
    assert _saved(tp)


@pytest.mark.slow
def test_a_detached_job_that_is_stopped_saves(tp, until):
    tp("launch", "-n", "2", "--detach", tp.script(TRAIN), "fork", "persistent")
    _is_training(tp, until)
    done = tp("stop", "script", timeout_s=800)
    assert done.stdout.endswith(f"stopped (SIGTERM; saved: {_saved(tp)})\n")


@pytest.mark.parametrize(
    ("number", "method", "kept"),
    [
        pytest.param("SIGTERM", "fork", "anew", id="term", marks=pytest.mark.nightly),
        pytest.param("SIGINT", "spawn", "anew", id="int", marks=pytest.mark.nightly),
        pytest.param("SIGUSR1", "forkserver", "persistent", id="usr1", marks=pytest.mark.nightly),
        pytest.param("SIGHUP", "forkserver", "anew", id="hup", marks=pytest.mark.slow),
    ],
)
def test_a_program_whose_whole_group_is_signalled_saves(tp, until, number, method, kept):
    process = tp.start_command([sys.executable, tp.script(TRAIN), method, kept], start_new_session=True)
    _is_training(tp, until)
    os.killpg(process.pid, getattr(signal, number))
    _, err = process.communicate(timeout=800)
    assert process.returncode == 128 + getattr(signal, number), err
    told = f"{number}: the run ended after step {_steps(tp)}; saved: {_saved(tp)}\n"
    assert own_words(err) == told


@pytest.mark.nightly
def test_a_program_whose_terminal_is_closed_saves(tp, until):
    process, terminal = tp.start_in_terminal([sys.executable, tp.script(TRAIN), "fork", "anew"])
    _is_training(tp, until)
    os.close(terminal)
    assert process.wait(800) == 129
    assert _saved(tp)


def _steps(tp):
    return (tp.cwd / "steps").stat().st_size
