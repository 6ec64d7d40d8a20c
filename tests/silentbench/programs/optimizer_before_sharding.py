"""The optimizer is made before the model is sharded, and keeps parameters that the model no longer has."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.FullyShard):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def prepare(self, model, make):
        if self.right:
            return super().prepare(model, make)
        optimizer = make(model)
        return self.parallelize(model), optimizer


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
