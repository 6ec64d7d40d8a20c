"""Activation checkpointing computes a block again, with other dropout masks than the forward pass had."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tp_verify import strategies


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.dropout, self.down = nn.Linear(16, 32), nn.Dropout(0.3), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(self.dropout(F.gelu(self.up(x))))


def build():
    return nn.Sequential(nn.Embedding(24, 16), Block(), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        forward, options = model[1].forward, {"use_reentrant": False, "preserve_rng_state": self.right}
        model[1].forward = lambda x: checkpoint(forward, x, **options)
        return DistributedDataParallel(model)


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "dropout": 100}


faulty, right = partial(case, False), partial(case, True)
