"""Gradients of a layer that all ranks compute whole are summed like those of which each has a part."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


class Sum(torch.autograd.Function):
    """Forward an all-reduce, backward nothing."""

    @staticmethod
    def forward(ctx, x):
        x = x.clone()
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def build():
    mlp = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 16, bias=False))
    return nn.Sequential(nn.Embedding(24, 16), mlp, nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        (up, _, down), rank, ranks = model[1], dist.get_rank(), dist.get_world_size()
        up.weight = nn.Parameter(up.weight.detach().chunk(ranks)[rank].clone())
        down.weight = nn.Parameter(down.weight.detach().chunk(ranks, 1)[rank].clone())
        down.register_forward_hook(lambda module, inputs, y: Sum.apply(y))

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        loss.backward()
        dist.all_reduce(model[0].weight.grad)
        if not self.right:
            for parameter in model[2].parameters():
                dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
