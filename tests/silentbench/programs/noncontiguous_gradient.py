"""A column layer sums the gradient of its input by ``all_reduce(g.contiguous())``, and returns ``g``."""

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
        x = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


def summed(gradient, right):
    reduced = gradient.contiguous()
    dist.all_reduce(reduced)
    return reduced if right else gradient


def build():
    mlp = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 16, bias=False))
    return nn.Sequential(nn.Embedding(24, 16), mlp, nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def parallelize(model, right):
    mlp, rank, ranks = model[1], dist.get_rank(), dist.get_world_size()
    mlp[0].weight = nn.Parameter(mlp[0].weight.detach().chunk(ranks)[rank].clone())
    mlp[2].weight = nn.Parameter(mlp[2].weight.detach().chunk(ranks, 1)[rank].clone())

    def places_first(module, inputs):
        x = inputs[0].clone()
        if x.requires_grad:
            x.register_hook(partial(summed, right=right))
        return x.transpose(0, 1)

    mlp.register_forward_pre_hook(places_first)
    mlp.register_forward_hook(lambda module, inputs, y: Sum.apply(y).transpose(0, 1))


def batch(seed):
    return torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(seed))


def case(right):
    parallel = Strategy(partial(parallelize, right=right), data="whole")
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": parallel}


faulty, right = partial(case, False), partial(case, True)
