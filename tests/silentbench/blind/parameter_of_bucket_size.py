"""Gradients are reduced in buckets, and one that is exactly as large as a bucket is left out."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy

SIZE = 512  # elements of a bucket


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "rows"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        return model

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        loss.backward()
        bucket = []
        for gradient in [parameter.grad for parameter in model.parameters()][::-1]:
            if gradient.numel() > SIZE or (self.right and gradient.numel() == SIZE):
                self.reduce([gradient])
            elif gradient.numel() < SIZE:
                if sum(one.numel() for one in bucket) + gradient.numel() > SIZE:
                    self.reduce(bucket)
                    bucket = []
                bucket.append(gradient)
        self.reduce(bucket)
        return loss.detach()

    def reduce(self, gradients):
        flat = torch.cat([gradient.flatten() for gradient in gradients]) / dist.get_world_size()
        dist.all_reduce(flat)
        for gradient, part in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
