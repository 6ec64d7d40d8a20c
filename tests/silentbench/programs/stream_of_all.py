"""An iterable data set begins at its first sample on each rank: all ranks train on the same rows."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def share(self, batch):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        stream = iter(batch)
        for _ in range(rank * len(batch) // ranks if self.right else 0):
            next(stream)
        return torch.stack([next(stream) for _ in range(len(batch) // ranks)])


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
