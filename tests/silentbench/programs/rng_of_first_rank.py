"""A checkpoint has the first rank's state of the random numbers, and all ranks continue with it."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.Dropout(0.2), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def file(self, folder):
        return Path(folder) / f"rank{dist.get_rank() if self.right else 0}.pt"

    def save(self, model, optimizer, folder):
        if self.right or dist.get_rank() == 0:
            weights, states = model.module.state_dict(), optimizer.state_dict()
            torch.save((weights, states, torch.get_rng_state()), self.file(folder))
        dist.barrier()

    def load(self, model, optimizer, folder):
        weights, states, numbers = torch.load(self.file(folder))
        model.module.load_state_dict(weights)
        optimizer.load_state_dict(states)
        torch.set_rng_state(numbers)


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "reload_on": 2}


faulty, right = partial(case, False), partial(case, True)
