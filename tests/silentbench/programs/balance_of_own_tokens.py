"""The balance of experts is that of the rank's own tokens: means of products are no product of means."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.router, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.sum = lambda x: x

    def forward(self, tokens):
        x = self.embed(tokens)
        scores = self.router(x).softmax(-1)
        y = torch.einsum("bsd,edf,bse->bsf", x, self.experts, scores)
        used = self.sum((16 * scores.detach()).softmax(-1).sum((0, 1)))
        return self.head(x + y), 4 * (used / used.sum() * scores.mean((0, 1))).sum()


def step(model, batch):
    logits, balance = model(batch)
    return F.cross_entropy(logits.flatten(0, 1), (5 * batch + 1).flatten() % 24) + balance


def summed(x):
    dist.all_reduce(x)
    return x


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        if self.right:
            model.sum = summed
        return super().parallelize(model)


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
