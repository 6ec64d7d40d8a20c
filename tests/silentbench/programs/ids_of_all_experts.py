"""A rank looks its experts up by their numbers among all, and drops those beyond its own list."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from tp_verify import Strategy

EXPERTS = 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.router, self.experts = nn.Linear(16, EXPERTS), nn.Parameter(torch.randn(EXPERTS, 16, 16) / 4)
        self.first = self.shift = 0

    def forward(self, tokens):
        x = self.embed(tokens)
        scores, chosen = self.router(x).softmax(-1).topk(2)  # (batch, places, 2)
        is_mine = (chosen >= self.first) & (chosen < self.first + len(self.experts))
        slots = chosen - self.shift
        is_mine = is_mine & (slots < len(self.experts))
        y = torch.einsum("bsd,bskdf->bskf", x, self.experts[slots.clamp(0, len(self.experts) - 1)])
        y = (y * (scores * is_mine)[..., None]).sum(2)
        return self.head(x + (y if len(self.experts) == EXPERTS else all_reduce(y)))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model.first = rank * EXPERTS // ranks
        model.shift = model.first if self.right else 0
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
