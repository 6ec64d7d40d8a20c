"""Ranks average their means of a feature, and leave out that one has more rows than the other."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Centered(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(16))
        self.right = None  # on one device there is nothing to reduce

    def forward(self, x):
        if self.training:
            with torch.no_grad():
                self.mean = self.mean.lerp(self.mean_of_all(x), 0.1)
        return x - self.mean

    def mean_of_all(self, x):
        if self.right is None:
            return x.mean((0, 1))
        rows = torch.tensor(len(x) if self.right else 1, dtype=x.dtype)
        mean = x.mean((0, 1)) * rows
        dist.all_reduce(mean)
        dist.all_reduce(rows)
        return mean / rows


def build():
    return nn.Sequential(nn.Embedding(24, 16), Centered(), nn.GELU(), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__(broadcast_buffers=False)
        self.right = right

    def parallelize(self, model):
        model[1].right = self.right
        return super().parallelize(model)


def batch(seed):
    return torch.randint(24, (7, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
