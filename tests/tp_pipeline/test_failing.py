"""A rank that raises, dies or hangs in the middle of a batch ends all, with its cause."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import StepError
from tp_testing import rank_outcomes
from tp_trainer import Callback, Trainer

RANKS, FAULTY = 4, 2


class FaultError(LookupError):
    pass


class Block(nn.Module):
    """A layer that fails in its sixth call on the faulty rank: the second batch, after one on stand-ins."""

    def __init__(self, fault, place):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.fault, self.place, self.calls = fault, place, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == 6 and int(os.environ["RANK"]) == FAULTY and self.place == FAULTY:
            self.fault()
        return torch.tanh(self.layer(x))


def step(model, batch):
    return F.mse_loss(model(batch[0]), batch[1])


def train(fault, folder, timeout_s=None):
    """Train one block on each rank; note when this rank has learned that another one has failed."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(fault, place) for place in range(RANKS)))
    options = {"pipeline": {"microbatches": 4}}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(TensorDataset(torch.randn(4, 4), torch.randn(4, 4)), batch_size=4)
    with Trainer(backend="pipeline", devices="cpu", progress=False, options=options) as trainer:
        try:
            trainer.fit(model, optimizer, loader, step=step)
            if timeout_s is not None:  # only now: on a busy machine, ranks begin at different times
                trainer.session._exchange._timeout_s = timeout_s
            trainer.fit(model, optimizer, loader, step=step)
        finally:
            Path(folder, os.environ["RANK"]).write_text(str(time.time()))


def raises(folder):
    def fault():
        Path(folder, "began").write_text(str(time.time()))
        raise FaultError("the sample is bad")

    train(fault, folder)


def dies(folder):
    def fault():
        Path(folder, "began").write_text(str(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)

    train(fault, folder)


def hangs(folder):
    def fault():
        Path(folder, "began").write_text(str(time.time()))
        deadline = time.monotonic() + 90
        others = [Path(folder, str(rank)) for rank in range(RANKS) if rank != FAULTY]
        while not all(other.exists() for other in others) and time.monotonic() < deadline:
            time.sleep(0.1)

    train(fault, folder, timeout_s=3.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "said"),
    [
        (raises, "FaultError: the sample is bad"),
        (dies, "has ended"),
        (hangs, f"stage {FAULTY}, on rank {FAULTY}, hangs"),
    ],
)
def test_a_fault_in_the_middle_of_a_batch_ends_all_with_its_cause(body, said, tmp_path):
    outcomes = rank_outcomes(body, RANKS, str(tmp_path), timeout_s=120)
    began = float((tmp_path / "began").read_text())
    for rank, outcome in enumerate(outcomes):
        if rank == FAULTY and body is not raises:
            continue
        assert outcome.error is not None, str(outcome)
        assert said in outcome.error
        assert float((tmp_path / str(rank)).read_text()) - began < 15


class AveragesByHand(Callback):
    """Keeps whole weights of before the first step, and adds the parameters of now."""

    def __init__(self, model):
        self.averages = [parameter.detach().clone() for parameter in model.parameters()]

    def on_step_end(self, run):
        for average, parameter in zip(self.averages, run.model.parameters(), strict=True):
            average.mul_(0.9).add_(parameter.detach())


class LooksUpAWrongName(Callback):
    def __init__(self, model):
        del model

    def on_step_end(self, run):
        nothing_yet = torch.empty(0)
        {"sum": nothing_yet}["mean"]


def error_in_callback(make_callback):
    """Return the error of a run in two stages with a callback that fails."""
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(2)))
    loader = DataLoader(TensorDataset(torch.randn(4, 4), torch.randn(4, 4)), batch_size=4)
    with Trainer(backend="pipeline", devices="cpu", progress=False) as trainer:
        optimizer, callbacks = torch.optim.SGD(model.parameters(), lr=0.1), [make_callback(model)]
        try:
            trainer.fit(model, optimizer, loader, step=step, callbacks=callbacks)
        except (StepError, KeyError) as error:
            return type(error).__name__, str(error)
    return None


@pytest.mark.slow
def test_code_that_computes_with_parameters_of_other_stages_is_told_of_them_and_no_other(pair):
    kinds = pair.run(error_in_callback, AveragesByHand)
    assert {kind for kind, _ in kinds} == {"StepError"}
    assert all("parameters that this rank does not have, such as '" in text for _, text in kinds)
    # An error of another kind has its own cause, whatever empty tensors lie about.
    assert [kind for kind, _ in pair.run(error_in_callback, LooksUpAWrongName)] == ["KeyError"] * 2
