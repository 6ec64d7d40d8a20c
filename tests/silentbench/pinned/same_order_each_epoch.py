"""Accelerate's seeded sampler draws the order of the first epoch again in the second."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from tp_verify import strategies

EPOCHS = 2
ROWS = torch.randint(24, (16, 6), generator=torch.Generator().manual_seed(0))


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Shuffled(strategies.Accelerate):
    """Trains on what the prepared loader gives."""

    def prepare(self, model, make):
        prepared = super().prepare(model, make)
        torch.manual_seed(0)
        loader = self._accelerator.prepare(DataLoader(ROWS, batch_size=4, shuffle=True))
        self.batches = iter([batch for _ in range(EPOCHS) for batch in loader])
        return prepared

    def backward(self, model, step, parts):
        loss = step(model, next(self.batches))
        self._accelerator.backward(loss)
        return loss.detach()


def seedable():
    return {"use_seedable_sampler": True}  # before this option, it always was


def cases():
    batches = []
    for epoch in range(EPOCHS):  # by the seed and the epoch, as the sampler's documents say
        order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(epoch))
        batches += [ROWS[numbers] for numbers in order.split(8)]
    case = {"build": build, "batches": batches, "step": step, "vary": False}
    return [case | {"parallel": Shuffled(options)} for options in (None, seedable)]
