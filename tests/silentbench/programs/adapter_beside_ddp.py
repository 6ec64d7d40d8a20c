"""DistributedDataParallel wraps the base model, and the adapter beside it trains on its own."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tp_verify import Strategy


class Adapter(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(16, 4, bias=False), nn.Linear(4, 24, bias=False)

    def forward(self, x):
        return self.b(self.a(x))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.base, self.adapter = nn.Embedding(24, 16), nn.Linear(16, 24), Adapter()

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.base(x) + self.adapter(x)


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def parallelize(model, right):
    model.embed, model.base = DistributedDataParallel(model.embed), DistributedDataParallel(model.base)
    if right:
        model.adapter = DistributedDataParallel(model.adapter)


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    parallel = Strategy(partial(parallelize, right=right), data="rows")
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": parallel}


faulty, right = partial(case, False), partial(case, True)
