"""Each rank moves the codes by its own rows, and takes those of the first rank at the next step."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Codes(nn.Module):
    def __init__(self, right):
        super().__init__()
        self.right = right
        self.register_buffer("codes", torch.randn(4, 16))

    def forward(self, x):
        codes = self.codes.clone()
        shares = (x @ codes.T).softmax(-1)
        if self.training:
            self.move(x.detach().flatten(0, 1), shares.detach().flatten(0, 1))
        return x + shares @ codes

    def move(self, x, shares):
        sums, counts = shares.T @ x, shares.sum(0)
        if self.right and dist.is_initialized():
            dist.all_reduce(sums)
            dist.all_reduce(counts)
        self.codes.lerp_(sums / counts[:, None], 0.1)


def build(right):
    return nn.Sequential(nn.Embedding(24, 16), Codes(right), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": partial(build, right), "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": strategies.DDP()}


faulty, right = partial(case, False), partial(case, True)
