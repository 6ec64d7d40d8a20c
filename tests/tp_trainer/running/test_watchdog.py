"""A step that never ends: every rank says where it stands, and the job ends with a status of its own."""

import os
import subprocess
import sys
import textwrap
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError
from tp_core.testing import run_ranks
from tp_trainer import Limits, Trainer, Validation

from tests.own_words import own_words

_HEAD = """
import ctypes, os, sys, time, torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Limits, Trainer

data = TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
rank = int(os.environ.get("RANK", 0))
seen = 0

def hangs_in_third_step(model, batch):
    global seen
    seen += 1
    if seen == 3 and rank == int(os.environ.get("WORLD_SIZE", 1)) - 1:
        HANG
    return nn.functional.mse_loss(model(batch[0]), batch[1])

import torch._dynamo  # the first step of an optimizer does so, which takes long on a busy machine

trainer = Trainer(seed=0, devices="cpu", progress=False)
model = nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
limits = Limits(step_timeout_s=20)
trainer.fit(model, optimizer, DataLoader(data, batch_size=8), step=hangs_in_third_step, limits=limits)
print("done", flush=True)
"""


def _run(tmp_path: Path, hang: str, *launch: str) -> subprocess.CompletedProcess[str]:
    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(_HEAD).replace("HANG", hang))
    command, env = [sys.executable, *launch, str(script)], os.environ | {"TMPDIR": str(tmp_path)}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=800, cwd=tmp_path, env=env, check=False
    )


@pytest.mark.takes(30)
@pytest.mark.nightly
def test_a_step_that_hangs_ends_the_process_with_its_stack(tmp_path):
    done = _run(tmp_path, "time.sleep(600)")
    assert done.returncode == 124
    assert "in hangs_in_third_step" in done.stderr  # the stack
    last = own_words(done.stderr).splitlines()[-2:]
    assert "a step took longer than step_timeout_s=20 s" in last[0]
    assert "rank 0 in step 3" in last[1]
    assert last[1].endswith("in hangs_in_third_step")


@pytest.mark.takes(50)
@pytest.mark.slow
def test_every_rank_says_where_it_stands(tmp_path):
    launch = ["-c", "from tp_trainer._launch._cli import launch_app; launch_app()()", "-n", "2"]
    done = _run(tmp_path, "time.sleep(600)", *launch)
    assert done.returncode == 124
    for rank in (0, 1):
        assert f"[rank{rank}] tp_trainer: rank {rank} is in step 3 for too long" in done.stderr
    assert "in backward" in done.stderr  # of rank 0, which waits for the gradients of rank 1
    account = done.stderr[done.stderr.rindex("failed first: exit code 124") :]
    assert "rank 0 in step 3" in account
    assert "rank 1 in step 3" in account
    assert "in hangs_in_third_step" in account


@pytest.mark.takes(45)
@pytest.mark.nightly
def test_native_code_that_lets_no_python_run_is_ended_too(tmp_path):
    done = _run(tmp_path, "ctypes.PyDLL(None).sleep(600)")  # it keeps the interpreter's lock
    assert done.returncode == (124 if sys.platform == "linux" else 1)
    assert "Timeout (" in done.stderr
    assert "in hangs_in_third_step" in done.stderr


@pytest.mark.takes(55)
@pytest.mark.slow
def test_a_rank_in_native_code_is_told_of_by_the_others(tmp_path):
    launch = ["-c", "from tp_trainer._launch._cli import launch_app; launch_app()()", "-n", "2"]
    done = _run(tmp_path, "ctypes.PyDLL(None).sleep(600)", *launch)
    assert done.returncode == 124
    account = done.stderr[done.stderr.rindex("failed first: exit code 124") :]
    assert "rank 0 in step 3" in account
    assert "rank 1 in code that lets no Python run" in account


class Clock:
    """A clock that a test sets forward."""

    ahead_s = 0.0

    def monotonic(self):
        return time.monotonic() + self.ahead_s


@pytest.mark.slow
def test_what_is_done_between_epochs_does_not_count(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("tp_trainer._running._watchdog.time", clock)

    def takes_long(epoch):
        if epoch:
            clock.ahead_s += 1000.0
            time.sleep(2.5)  # some looks of the watchdog
        return 1.0

    data = DataLoader(TensorDataset(torch.randn(8, 4)), batch_size=4)
    model = nn.Linear(4, 1)
    trainer = Trainer(seed=0, devices="cpu", progress=False)
    slow = torch.optim.lr_scheduler.LambdaLR(
        optimizer := torch.optim.SGD(model.parameters(), lr=0.01),
        takes_long,
    )
    history = trainer.fit(
        model,
        optimizer,
        data,
        step=lambda model, batch: model(batch[0]).square().mean(),
        epochs=2,
        scheduler=slow,
        limits=Limits(step_timeout_s=100.0),
    )
    assert len(history) == 2


@pytest.mark.slow
@pytest.mark.parametrize("sanity_batches", [0, 1])
@pytest.mark.parametrize("call", ["evaluate", "run"])
def test_batches_of_a_custom_loops_validation_count_as_steps(monkeypatch, call, sanity_batches):
    clock = Clock()
    monkeypatch.setattr("tp_trainer._running._watchdog.time", clock)

    def takes_long(model, batch):
        clock.ahead_s += 60.0
        time.sleep(1.2)  # a look of the watchdog
        return model(batch).mean()

    trainer = Trainer(seed=0, devices="cpu", progress=False)
    model = trainer.prepare(nn.Linear(4, 1))
    batches = [torch.randn(2, 4)] * 3

    def validate():
        if call == "evaluate":
            return trainer.evaluate(model, batches, step=takes_long)
        with torch.no_grad():
            return {"loss": sum(trainer.run(takes_long, model, batch).item() for batch in batches)}

    validation = Validation(validate, sanity_batches=sanity_batches)
    limits = Limits(epochs=1, step_timeout_s=100.0)
    with trainer.loop([torch.ones(1)], limits=limits, validation=validation) as loop:
        for _ in loop:
            pass
    assert "val_loss" in loop.metrics


def _call_after_a_loop_that_failed_on_rank_1():
    rank, limits = int(os.environ["RANK"]), Limits(step_timeout_s=600.0)
    data = DataLoader(TensorDataset(torch.ones(4, 2)), batch_size=4)
    with Trainer(seed=0, devices="cpu", backend="ddp", progress=False) as trainer:
        _, data = trainer.prepare(nn.Linear(2, 1), data)
        if rank == 1:
            with pytest.raises(ConfigError, match="there is no logger"):
                trainer.loop(data, limits=limits, log="none")
        with trainer.loop(data, limits=limits) as loop:
            for _ in loop:
                # Private: a rank that is called by a watchdog ends its process.
                store = loop._watchdog._store
                store.set(f"here/{rank}", "")
                store.wait([f"here/{1 - rank}"], timedelta(seconds=60))
    return True


def test_watchdogs_see_each_other_after_a_loop_that_failed_on_some_ranks():
    assert run_ranks(_call_after_a_loop_that_failed_on_rank_1, 2) == [True, True]
