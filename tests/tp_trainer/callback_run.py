"""A small run with callbacks, on any backend, for their tests."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from tp_trainer import Callback, Checkpoints, Trainer

from tests.reference_training import StoppedError, rows_and_sums, squared_error

STEPS = 5  # of an epoch

BACKENDS = {
    "single": {"backend": "single", "devices": "cpu"},
    "tuple": {"backend": "tuple", "devices": ["cpu"] * 2},
    "dp-gather": {"backend": "dp-gather", "devices": ["cpu"] * 2},
    "ddp": {"backend": "ddp", "devices": "cpu"},
}


class StopAt(Callback):
    """Ends a run after a step as an error does."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, run):
        if run.step == self.step:
            raise StoppedError


class Spy(Callback):
    """Keeps what callbacks after it log, with the steps."""

    def __init__(self):
        self.logged = []

    def on_fit_start(self, run):
        run.log = lambda **numbers: self.logged.append((run.step, numbers))


def network():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)).double()


def data(samples=20):
    return rows_and_sums(samples)


def train(
    callbacks, *, backend="single", accumulate=1, epochs=2, folder=None, model=None, optimizer=None, **options
):
    """Train and return the model and the history; with ``folder`` saved in each step, and resumed."""
    model = network() if model is None else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05) if optimizer is None else optimizer
    options = {"step": squared_error, "validation": DataLoader(data(7), batch_size=4)} | options
    if folder is not None:
        options |= {"checkpoint": Checkpoints(folder, every_steps=1), "resume": "auto"}
    with Trainer(**BACKENDS[backend], seed=3, accumulate=accumulate, progress=False) as trainer:
        loader = DataLoader(data(), batch_size=4, shuffle=True)
        history = trainer.fit(model, optimizer, loader, epochs=epochs, callbacks=callbacks, **options)
    return model, history


def stop(step, callbacks, **options):
    """Train until the step, and end as a run that is killed does."""
    try:
        train([*callbacks, StopAt(step)], **options)
    except StoppedError:
        return
    msg = "the run was not stopped"
    raise AssertionError(msg)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))
