"""States are saved in the order of the model's parameters, and loaded in that of the optimizer's groups."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    layers = [nn.Linear(16, 16, bias=False) for _ in range(2)]
    return nn.Sequential(nn.Embedding(24, 16), *layers, nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def grouped(model):
    first, second, third, *others = model.parameters()
    groups = [{"params": [first, third], "lr": 1e-2}, {"params": [second, *others], "lr": 1e-3}]
    return torch.optim.AdamW(groups)


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def save(self, model, optimizer, folder):
        order = ordered(optimizer) if self.right else model.parameters()
        states = [optimizer.state[parameter] for parameter in order]
        torch.save((model.module.state_dict(), states), Path(folder) / f"{dist.get_rank()}.pt")

    def load(self, model, optimizer, folder):
        weights, states = torch.load(Path(folder) / f"{dist.get_rank()}.pt")
        model.module.load_state_dict(weights)
        for parameter, state in zip(ordered(optimizer), states, strict=True):
            optimizer.state[parameter] = state


def ordered(optimizer):
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "optimizer": grouped, "reload_on": 2}


faulty, right = partial(case, False), partial(case, True)
