"""The optimizer had the head alone; after sharding it gets all parameters of the model."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def of_head(model):
    return torch.optim.AdamW(model[3].parameters(), lr=1e-2)


class Training(strategies.FullyShard):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def prepare(self, model, make):
        if self.right:
            return super().prepare(model, make)
        optimizer = make(model)
        model = self.parallelize(model)
        optimizer.param_groups[0]["params"] = list(model.parameters())
        return model, optimizer


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "optimizer": of_head}


faulty, right = partial(case, False), partial(case, True)
