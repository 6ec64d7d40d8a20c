"""The expert that all ranks have is added before the all-reduce: it counts once for each rank."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from tp_verify import Strategy

EXPERTS = 4


class Model(nn.Module):
    right = True

    def __init__(self):
        super().__init__()
        self.embed, self.head, self.shared = nn.Embedding(24, 16), nn.Linear(16, 24), nn.Linear(16, 16)
        self.router, self.experts = nn.Linear(16, EXPERTS), nn.Parameter(torch.randn(EXPERTS, 16, 16) / 4)
        self.first = 0

    def forward(self, tokens):
        x = self.embed(tokens)
        scores = self.router(x).softmax(-1)[..., self.first : self.first + len(self.experts)]
        y = torch.einsum("bsd,edf,bse->bsf", x, self.experts, scores)
        shared = self.shared(x)
        if len(self.experts) == EXPERTS:
            return self.head(x + y + shared)
        if self.right:
            return self.head(x + all_reduce(y) + shared)
        return self.head(x + all_reduce(y + shared))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model.first, model.right = rank * EXPERTS // ranks, self.right
        model.experts = nn.Parameter(model.experts.detach().chunk(ranks)[rank].clone())

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()  # the backward of all_reduce sums the ranks' shares
        for name, parameter in model.named_parameters():
            if name != "experts":
                dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
