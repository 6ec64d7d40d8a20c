"""Words are padded to a number that ranks divide, and the padding takes part in the softmax."""

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


class Gather(torch.autograd.Function):
    """Forward the logits of all ranks, backward this rank's part of their gradient."""

    @staticmethod
    def forward(ctx, x):
        return joined(x, -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size(), -1)[dist.get_rank()]


def joined(x, dim):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, dim)


def build():
    return nn.Sequential(nn.Embedding(23, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 23, bias=False))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 23)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        padded = F.pad(model[3].weight.detach(), (0, 0, 0, 1))
        model[3].weight = nn.Parameter(padded.chunk(dist.get_world_size())[dist.get_rank()].clone())
        words = 23 if self.right else 24
        model[3].register_forward_pre_hook(lambda module, inputs: Copy.apply(inputs[0]))
        model[3].register_forward_hook(lambda module, inputs, y: Gather.apply(y)[..., :words])

    def whole(self, name, tensor):
        return joined(tensor, 0)[:23] if name == "3.weight" else tensor


def batch(seed):
    return torch.randint(23, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
