"""The loop calls the module inside DistributedDataParallel, so nothing reduces its gradients."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "rows"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        self.wrapped = DistributedDataParallel(model)
        return self.wrapped if self.right else self.wrapped.module


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
