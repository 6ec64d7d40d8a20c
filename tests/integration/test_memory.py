"""A trainer holds one batch at a time, on every backend for one process: nothing waits for the collector."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset
from tp_trainer import Trainer

from tests import reference_training

BACKENDS = pytest.mark.parametrize(
    ("backend", "devices"), [("single", "cpu"), ("tuple", ["cpu"] * 2), ("dp-gather", ["cpu"] * 2)]
)
SAMPLES, BATCH = 24, 6


class Watched(Dataset):
    """Samples of one row each; a collate function makes a counted, nested batch of them."""

    def __len__(self):
        return SAMPLES

    def __getitem__(self, i):
        return {"x": [torch.ones(4)], "y": (torch.ones(2),)}


def collate(live):
    def make(items):
        return {"x": [live.tensor(len(items), 4)], "y": (live.tensor(len(items), 2),)}

    return make


def step(model, batch):
    return nn.functional.mse_loss(model(batch["x"][0]), batch["y"][0])


def plain(loader):
    model = nn.Linear(4, 2)
    reference_training.train(model, torch.optim.SGD(model.parameters(), 0.1), loader, step)


def fit(trainer, loader):
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    trainer.fit(model, optimizer, loader, step=step, epochs=2, validation=loader)


def own_loop(trainer, loader):
    model = nn.Linear(4, 2)
    model, optimizer, loader = trainer.prepare(model, torch.optim.SGD(model.parameters(), 0.1), loader)
    run = functools.partial(trainer.session.run, step)
    reference_training.train(model, optimizer, loader, run, backward=trainer.backward)


@BACKENDS
@pytest.mark.parametrize("train", [fit, own_loop])
def test_no_more_is_held_at_once_than_in_a_plain_loop(memory, train, backend, devices):
    peaks = []
    for run in (plain, None):
        live = memory.LiveBytes()
        loader = DataLoader(Watched(), BATCH, collate_fn=collate(live))
        with memory.without_collector():
            if run is not None:
                run(loader)
            else:
                with Trainer(backend=backend, devices=devices, progress=False) as trainer:
                    train(trainer, loader)
        peaks.append(live.peak)
    assert peaks[1] <= peaks[0]


@BACKENDS
@pytest.mark.parametrize("train", [fit, own_loop])
def test_a_step_leaves_nothing_to_the_collector(memory, train, backend, devices):
    left = []

    class Counting(torch.optim.SGD):
        def step(self, *args, **kwargs):
            result = super().step(*args, **kwargs)
            left.append(gc.collect())
            return result

    live = memory.LiveBytes()
    loader = DataLoader(Watched(), BATCH, collate_fn=collate(live))
    model = nn.Linear(4, 2)
    optimizer = Counting(model.parameters(), 0.1)
    with memory.without_collector(), Trainer(backend=backend, devices=devices, progress=False) as trainer:
        if train is fit:
            trainer.fit(model, optimizer, loader, step=step, epochs=3)
        else:
            prepared, optimizer, prepared_loader = trainer.prepare(model, optimizer, loader)
            for _ in range(3):
                for batch in prepared_loader:
                    trainer.backward(trainer.session.run(step, prepared, batch))
                    optimizer.step()
    # The first step makes what stays; epochs begin and end between some of the others.
    within = [n for i, n in enumerate(left) if i >= 2 and i % (SAMPLES // BATCH)]
    assert within == [0] * len(within)


def earlier_batches_of(backend, count):
    """Return how many batches of earlier steps are in memory in each step of several models, on this rank."""
    batches, found = [], []

    def run_all(*models_and_batch):
        *models, batch = models_and_batch
        found.append(sum(reference() is not None for reference in batches))
        batches.append(weakref.ref(batch))
        return sum(model(batch).square().mean() for model in models)

    with Trainer(backend=backend, devices="cpu", progress=False) as trainer:
        models = [nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2)) for _ in range(count)]
        parameters = [p for model in models for p in model.parameters()]
        *models, optimizer, loader = trainer.prepare(
            *models, torch.optim.SGD(parameters, 0.1), DataLoader(torch.ones(SAMPLES, 4), BATCH)
        )
        gc.collect()
        gc.disable()
        try:
            for batch in loader:
                trainer.backward(trainer.run(run_all, *models, batch))
                optimizer.step()
                optimizer.zero_grad()
                del batch
        finally:
            gc.enable()
    return found


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("backend", ["ddp", "fsdp"])
def test_ranks_free_a_batch_before_the_next_one(two_ranks, backend, count):
    assert two_ranks.run(earlier_batches_of, backend, count) == [[0] * (SAMPLES // BATCH)] * 2
