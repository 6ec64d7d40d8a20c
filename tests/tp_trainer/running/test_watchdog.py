"""A step that never ends: every rank says where it stands, and the job ends with a status of its own."""

import os
import sys
import time
from datetime import timedelta

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import ConfigError
from tp_testing import run_ranks
from tp_trainer import Limits, Trainer, Validation

from tests.own_words import own_words
from tests.tp_trainer.hanging_run import run_hanging


@pytest.mark.takes(30)
@pytest.mark.nightly
def test_a_step_that_hangs_ends_the_process_with_its_stack(tmp_path):
    done = run_hanging(tmp_path, "time.sleep(600)")
    assert done.returncode == 124
    assert "in hangs_in_third_step" in done.stderr  # the stack
    last = own_words(done.stderr).splitlines()[-2:]
    assert "a step took longer than step_timeout_s=20 s" in last[0]
    assert "rank 0 in step 3" in last[1]
    assert last[1].endswith("in hangs_in_third_step")


@pytest.mark.takes(45)
@pytest.mark.nightly
def test_native_code_that_lets_no_python_run_is_ended_too(tmp_path):
    done = run_hanging(tmp_path, "ctypes.PyDLL(None).sleep(600)")  # it keeps the interpreter's lock
    assert done.returncode == (124 if sys.platform == "linux" else 1)
    assert "Timeout (" in done.stderr
    assert "in hangs_in_third_step" in done.stderr


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
