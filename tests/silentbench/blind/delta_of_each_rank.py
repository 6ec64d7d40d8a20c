"""Each rank adds the whole output of an adapter to its summand of the layer's: it counts for every rank."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from tp_verify import Strategy


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(32, 16, bias=False).requires_grad_(False)
        self.a, self.b, self.right = nn.Linear(32, 4, bias=False), nn.Linear(4, 16, bias=False), None
        nn.init.zeros_(self.b.weight)

    def forward(self, x):
        if self.right is None:
            return self.base(x) + self.b(self.a(x))
        delta = self.b(all_reduce(self.a(x)))
        if self.right:
            return all_reduce(self.base(x)) + delta
        return all_reduce(self.base(x) + delta)


def build():
    up = nn.Linear(16, 32, bias=False)
    return nn.Sequential(nn.Embedding(24, 16), up, nn.GELU(), Adapted(), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        rank, ranks, adapted = dist.get_rank(), dist.get_world_size(), model[3]
        adapted.right = self.right
        model[1].weight = nn.Parameter(model[1].weight.detach().chunk(ranks)[rank].clone())
        for layer, learns in ((adapted.base, False), (adapted.a, True)):
            weight = layer.weight.detach().chunk(ranks, 1)[rank].clone()
            layer.weight = nn.Parameter(weight, requires_grad=learns)

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()  # the backward of all_reduce sums the ranks' shares
        for parameter in (model[0].weight, model[3].b.weight, *model[4].parameters()):
            dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
