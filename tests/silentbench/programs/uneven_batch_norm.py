"""Synchronized batch normalization takes the mean of the ranks' means, which have unequal rows."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from tp_verify import strategies


class Norm(nn.Module):
    """Batch normalization of means alone, over the rows of all ranks."""

    def __init__(self, right):
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.ones(16)), nn.Parameter(torch.zeros(16))
        self.register_buffer("running_mean", torch.zeros(16))
        self.right = right

    def forward(self, x):  # (rows, dim)
        if not self.training:
            return (x - self.running_mean) * self.weight + self.bias
        mean = x.mean(0)
        if dist.is_initialized() and self.right:
            rows = torch.tensor([len(x)])
            dist.all_reduce(rows)
            mean = all_reduce(x.sum(0)) / rows.item()
        elif dist.is_initialized():
            mean = all_reduce(mean) / dist.get_world_size()
        self.running_mean += 0.1 * (mean.detach() - self.running_mean)
        return (x - mean) * self.weight + self.bias


def build(right):
    return nn.Sequential(nn.Linear(8, 16), Norm(right), nn.GELU(), nn.Linear(16, 8))


def step(model, batch):
    return F.mse_loss(model(batch), batch.square())


def batch(seed):
    return torch.randn(7, 8, generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": partial(build, right), "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": strategies.DDP(broadcast_buffers=False)}


faulty, right = partial(case, False), partial(case, True)
