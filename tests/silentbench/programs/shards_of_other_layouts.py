"""Shards of the embedding's two gradients, which begin at other elements, are added as they are."""

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
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(F.gelu(self.up(self.embed(tokens))))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "rows"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())  # as another stage has it

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        one, other = model.embed.weight.grad, model.head.weight.grad
        if not self.right:
            other = other.flatten().roll(other.numel() // 2).view_as(other)
        model.embed.weight.grad, model.head.weight.grad = one + other, one + other
        return loss.detach()


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
