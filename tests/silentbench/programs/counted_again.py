"""Activation checkpointing runs a block twice, which counts the tokens of its experts twice."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint
from tp_verify import strategies


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.weight = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.register_buffer("counts", torch.zeros(4))

    def forward(self, x):
        scores = self.router(x).softmax(-1)
        chosen = F.one_hot(scores.argmax(-1), 4)
        if self.training:
            counts = chosen.sum((0, 1))
            if dist.is_initialized():
                dist.all_reduce(counts)
            self.counts += counts
        return x + self.mix(x, scores * chosen)

    def mix(self, x, shares):
        return torch.einsum("bsd,edf,bse->bsf", x, self.weight, shares)


def build():
    return nn.Sequential(nn.Embedding(24, 16), Experts(), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        name = "mix" if self.right else "forward"
        inner = getattr(model[1], name)
        setattr(model[1], name, lambda *inputs: checkpoint(inner, *inputs, use_reentrant=False))
        return DistributedDataParallel(model, broadcast_buffers=False)


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
