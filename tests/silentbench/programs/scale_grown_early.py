"""The loss scale grows after the backward pass, and gradients are divided by the new scale."""

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
    scale, steps, window = 16.0, 0, 2

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        return DistributedDataParallel(model)

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss * self.scale).backward()
        used = self.scale
        self.steps += 1
        if self.steps % self.window == 0:
            self.scale = min(2 * self.scale, 65536.0)
        for parameter in model.parameters():
            parameter.grad /= used if self.right else self.scale
        return loss.detach()


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "optimizer": sgd}


faulty, right = partial(case, False), partial(case, True)
