"""Gradients are clipped while they are still multiplied by the loss scale."""

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
    scale = 1024.0

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        return DistributedDataParallel(model)

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss * self.scale).backward()
        self.is_scaled = True
        return loss.detach()

    def gradient(self, parameter):
        return parameter.grad / self.scale if self.is_scaled else parameter.grad

    def unscale(self, model):
        if self.is_scaled:
            for parameter in model.parameters():
                parameter.grad /= self.scale
        self.is_scaled = False

    def clip(self, model, max_norm):
        if self.right:
            self.unscale(model)
        return super().clip(model, max_norm)

    def update(self, model, optimizer):
        self.unscale(model)
        super().update(model, optimizer)


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step, "optimizer": sgd}
    return made | {"parallel": Training(right), "max_norm": 1.0}


faulty, right = partial(case, False), partial(case, True)
