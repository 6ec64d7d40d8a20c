"""A checkpoint has the scheduler as it was before its last step: a resumed schedule lags behind."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def scheduled(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, LambdaLR(optimizer, lambda number: 1 / (1 + number))


def optimizer_of_one(model):
    optimizer, scheduler = scheduled(model)
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def prepare(self, model, make):
        model = self.parallelize(model)
        optimizer, self.scheduler = scheduled(model)
        self.state = self.scheduler.state_dict()
        return model, optimizer

    def update(self, model, optimizer):
        super().update(model, optimizer)
        before = self.scheduler.state_dict()
        self.scheduler.step()
        self.state = self.scheduler.state_dict() if self.right else before

    def save(self, model, optimizer, folder):
        states = model.module.state_dict(), optimizer.state_dict(), self.state
        torch.save(states, Path(folder) / f"{dist.get_rank()}.pt")

    def load(self, model, optimizer, folder):
        weights, states, schedule = torch.load(Path(folder) / f"{dist.get_rank()}.pt", weights_only=False)
        model.module.load_state_dict(weights)
        optimizer.load_state_dict(states)
        self.scheduler.load_state_dict(schedule)


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step, "optimizer": optimizer_of_one}
    return made | {"parallel": Training(right), "reload_on": 2}


faulty, right = partial(case, False), partial(case, True)
