"""Ranks draw the weights from one seed before they are sharded, and the first has drawn a number more."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build(draws=0):
    torch.manual_seed(5)
    torch.rand(draws)
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.FullyShard):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        draws = int(not self.right and dist.get_rank() == 0)
        return super().parallelize(build(draws).to(model[0].weight.dtype))


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
