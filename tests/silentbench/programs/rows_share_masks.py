"""All ranks have the same seed, so rows of different ranks get the same dropout masks."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    dropout = nn.Dropout(0.3)
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), dropout, nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def seed(self, number):
        if self.right:
            number = number * dist.get_world_size() + dist.get_rank()
        torch.manual_seed(number)


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "dropout": 100}


faulty, right = partial(case, False), partial(case, True)
