"""The head gets a new parameter after DistributedDataParallel has registered its hooks at the old one."""

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


def parallelize(model, right):
    head = model[3]
    if right:
        head.weight = nn.Parameter(head.weight.detach().clone())
    parallel = DistributedDataParallel(model, find_unused_parameters=not right)
    if not right:
        head.weight = nn.Parameter(head.weight.detach().clone())
    return parallel


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    parallel = Strategy(partial(parallelize, right=right), data="rows")
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": parallel}


faulty, right = partial(case, False), partial(case, True)
