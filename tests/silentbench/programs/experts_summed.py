"""Experts get tokens of all ranks: their gradients are sums over ranks, and all others are means."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather, all_reduce
from tp_verify import Strategy

EXPERTS = 4


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(EXPERTS, 16, 16) / 4)
        self.first = 0

    def forward(self, x, chosen):  # (tokens, dim), (tokens,)
        if len(self.weight) == EXPERTS:
            return self.routed(x, chosen)
        x = torch.cat(all_gather(x.contiguous()))
        every = [torch.empty_like(chosen) for _ in range(dist.get_world_size())]
        dist.all_gather(every, chosen)
        return all_reduce(self.routed(x, torch.cat(every))).chunk(len(every))[dist.get_rank()]

    def routed(self, x, chosen):
        y = torch.zeros_like(x)
        for number, weight in enumerate(self.weight):
            y = y + (x @ weight) * (chosen == self.first + number)[:, None]
        return y


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.experts, self.head = nn.Embedding(24, 16), Experts(), nn.Linear(16, 24)

    def forward(self, tokens):
        x = self.embed(tokens).flatten(0, 1)
        return self.head(x + self.experts(x, tokens.flatten() % EXPERTS))


def step(model, batch):
    return F.cross_entropy(model(batch), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "rows"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        rank, ranks, experts = dist.get_rank(), dist.get_world_size(), model.experts
        experts.first = rank * EXPERTS // ranks
        experts.weight = nn.Parameter(experts.weight.detach().chunk(ranks)[rank].clone())

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        loss.backward()
        for name, parameter in model.named_parameters():
            if "experts" not in name:
                dist.all_reduce(parameter.grad)
            if self.right or "experts" not in name:
                parameter.grad /= dist.get_world_size()
        return loss.detach()


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
