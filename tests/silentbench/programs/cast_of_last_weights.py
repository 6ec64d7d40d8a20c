"""The cast of a weight is kept for its next use, and used after the optimizer has stepped."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Shared(nn.Linear):
    keeps, cast = False, None

    def forward(self, x):
        if not self.keeps:
            return super().forward(x)
        if self.cast is None:
            self.cast = self.weight.detach().clone()
        return F.linear(x, self.weight + (self.cast - self.weight).detach(), self.bias)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.shared, self.head = nn.Embedding(24, 16), Shared(16, 16), nn.Linear(16, 24)

    def forward(self, tokens):
        return self.head(F.gelu(self.shared(F.gelu(self.shared(self.embed(tokens))))))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        model.shared.keeps = True
        return super().parallelize(model)

    def update(self, model, optimizer):
        super().update(model, optimizer)
        if self.right:
            model.module.shared.cast = None


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
