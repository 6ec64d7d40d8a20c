"""The global norm is the mean of the ranks' norms, and ranks own different experts."""

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
        self.experts, self.first = nn.Parameter(torch.randn(EXPERTS, 16, 16) / 4), 0

    def forward(self, tokens):
        x = self.embed(tokens)
        y = torch.zeros_like(x)
        for number, weight in enumerate(self.experts):
            y = y + (x @ weight) * (tokens % EXPERTS == self.first + number)[..., None]
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
        model.experts = nn.Parameter(model.experts.detach().chunk(ranks)[rank].clone())

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()  # the backward of all_reduce sums the ranks' shares
        for name, parameter in model.named_parameters():
            if name != "experts":
                dist.all_reduce(parameter.grad)
        return loss.detach()

    def clip(self, model, max_norm):
        squares = {name: p.grad.square().sum() for name, p in model.named_parameters()}
        if self.right:
            dist.all_reduce(squares["experts"])
        norm = sum(squares.values()).sqrt()
        dist.all_reduce(norm)
        norm /= dist.get_world_size()
        for parameter in model.parameters():
            parameter.grad *= (max_norm / (norm + 1e-6)).clamp(max=1.0)
        return norm


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step, "optimizer": sgd}
    return made | {"parallel": Training(right), "max_norm": 0.3}


faulty, right = partial(case, False), partial(case, True)
