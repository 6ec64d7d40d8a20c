"""A row-parallel layer of a model in float32 sums the ranks' products in bfloat16."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


class Copy(torch.autograd.Function):
    """Forward nothing, backward an all-reduce."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Sum(torch.autograd.Function):
    """Forward an all-reduce, backward nothing."""

    @staticmethod
    def forward(ctx, x, kind):
        total = x.to(kind, copy=True)
        dist.all_reduce(total)
        return total.to(x.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


def build():
    mlp = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16))
    return nn.Sequential(nn.Embedding(24, 16), mlp, nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def parallelize(model, right):
    (up, _, down), rank, ranks = model[1], dist.get_rank(), dist.get_world_size()
    up.weight = nn.Parameter(up.weight.detach().chunk(ranks)[rank].clone())
    up.bias = nn.Parameter(up.bias.detach().chunk(ranks)[rank].clone())
    down.weight = nn.Parameter(down.weight.detach().chunk(ranks, 1)[rank].clone())
    kind = down.weight.dtype if right else torch.bfloat16
    up.register_forward_pre_hook(lambda module, inputs: Copy.apply(inputs[0]))
    down.forward = lambda x: Sum.apply(F.linear(x, down.weight), kind) + down.bias


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    parallel = Strategy(partial(parallelize, right=right), data="whole")
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": parallel, "dtype": torch.float32}


faulty, right = partial(case, False), partial(case, True)
