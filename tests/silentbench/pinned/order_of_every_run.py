"""Accelerate's loader on several ranks ignores the seed: each run has the same order of rows."""

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler
from tp_verify import strategies

SEED = 7
ROWS = torch.randint(24, (24, 6), generator=torch.Generator().manual_seed(0))


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Shuffled(strategies.Accelerate):
    """Trains on what the prepared loader gives."""

    def prepare(self, model, make):
        prepared = super().prepare(model, make)
        set_seed(SEED)
        loader = self._accelerator.prepare(DataLoader(ROWS, batch_size=4, shuffle=True))
        self.batches = iter(list(loader))
        return prepared

    def backward(self, model, step, parts):
        loss = step(model, next(self.batches))
        self._accelerator.backward(loss)
        return loss.detach()


def cases():
    torch.manual_seed(SEED)
    batches = [ROWS[numbers] for numbers in BatchSampler(RandomSampler(ROWS), 8, drop_last=False)]
    return {"build": build, "batches": batches, "step": step, "parallel": Shuffled(), "vary": False}
