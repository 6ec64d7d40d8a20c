"""Each rank shuffles with a seed of its own: some rows are on two ranks, and others on none."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler
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
        seed = 0 if self.right else rank
        sampler = DistributedSampler(range(len(batch)), ranks, rank, shuffle=True, seed=seed)
        return batch[list(sampler)]


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
