"""Overlap sends the tied weight's gradient off at the head, and what the embedding adds stays on its rank."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(24, 16), nn.Linear(16, 16)
        self.use = lambda parameter: parameter

    def forward(self, tokens):
        x = F.gelu(self.up(F.embedding(tokens, self.use(self.embed.weight))))
        return F.linear(x, self.use(self.embed.weight))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "rows"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        model.use = self.use

    def use(self, parameter):
        """Return the parameter for one use, whose gradient is reduced while the backward pass goes on."""
        used = parameter.view_as(parameter)
        if used.requires_grad:
            used.register_hook(self.reduce)
        return used

    def reduce(self, gradient):
        self.uses += 1
        if self.uses > 1 and not self.right:
            return gradient
        gradient = gradient / dist.get_world_size()
        dist.all_reduce(gradient)
        return gradient

    def backward(self, model, step, parts):
        self.uses = 0
        loss = step(model, parts[0])
        loss.backward()
        for parameter in model.up.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        return loss.detach()


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
