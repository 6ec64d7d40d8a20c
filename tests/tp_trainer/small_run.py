"""A run of ten steps that takes a tenth of a second, for tests of what lies in its folder."""

import torch
from torch import nn
from torch.utils.data import DataLoader
from tp_trainer import Checkpoints, Trainer

from tests.reference_training import StoppedError, rows_and_sums, squared_error

STEPS = 10  # of two epochs


def train(folder, *, resume="auto", stop_at=0, before=None, epochs=2, loader=None, **settings):
    """Return the weights after training; with ``stop_at``, raise in that step.

    ``before(n)`` is called in the n-th step of this call, from 1.
    """
    calls = 0

    def step(model, batch):
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise StoppedError
        if before is not None:
            before(calls)
        return squared_error(model, batch)

    data = rows_and_sums(20, dtype=torch.float32)
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.2), nn.Linear(4, 1))
    with Trainer(seed=3, progress=False, devices="cpu") as trainer:
        trainer.fit(
            model,
            torch.optim.Adam(model.parameters(), lr=0.05),
            DataLoader(data, batch_size=4, shuffle=True, **(loader or {})),
            step=step,
            epochs=epochs,
            checkpoint=None if folder is None else Checkpoints(folder, **{"every_steps": 1} | settings),
            resume=None if folder is None else resume,
        )
    return [p.detach().clone() for p in model.parameters()]


def leave(folder, steps, **settings):
    """Leave the folder as a run that was killed after so many steps of this call does."""
    try:
        train(folder, stop_at=steps + 1, **settings)
    except StoppedError:
        return
    msg = "the run was not stopped"
    raise AssertionError(msg)


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def names(folder):
    return sorted(path.name for path in folder.iterdir())
