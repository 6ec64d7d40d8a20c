"""Ranks that compute the same activations have seeds of their own, and drop other elements of them."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


def build():
    dropout = nn.Dropout(0.3)
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), dropout, nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        return model

    def seed(self, number):
        if not self.right:
            number = number * dist.get_world_size() + dist.get_rank()
        torch.manual_seed(number)


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "dropout": 100}


faulty, right = partial(case, False), partial(case, True)
