"""A checkpoint has the moments of the optimizer, and not how many steps it has made."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def save(self, model, optimizer, folder):
        states = model.module.state_dict(), optimizer.state_dict()
        torch.save(states, Path(folder) / f"{dist.get_rank()}.pt")

    def load(self, model, optimizer, folder):
        weights, states = torch.load(Path(folder) / f"{dist.get_rank()}.pt")
        model.module.load_state_dict(weights)
        optimizer.load_state_dict(states)
        for state in optimizer.state.values():
            state["step"] *= self.right


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "reload_on": 2}


faulty, right = partial(case, False), partial(case, True)
