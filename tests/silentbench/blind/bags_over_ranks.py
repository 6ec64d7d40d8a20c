"""Ranks have rows of a table, and divide by how many of a bag's words they have themselves."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from tp_verify import Strategy


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.first, self.right = nn.Parameter(torch.randn(24, 16)), 0, None

    def forward(self, tokens):
        words = tokens - self.first
        mine = (words >= 0) & (words < len(self.weight))
        rows = F.embedding(words.clamp(0, len(self.weight) - 1), self.weight) * mine[..., None]
        if self.right is None:
            return rows.mean(1)
        if self.right:
            return all_reduce(rows.sum(1)) / tokens.shape[1]
        return all_reduce(rows.sum(1) / mine.sum(1, keepdim=True).clamp(min=1))


def build():
    return nn.Sequential(Bags(), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch), batch.sum(1) % 24)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        bags, rank, ranks = model[0], dist.get_rank(), dist.get_world_size()
        bags.weight = nn.Parameter(bags.weight.detach().chunk(ranks)[rank].clone())
        bags.first, bags.right = rank * len(bags.weight), self.right

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()  # the backward of all_reduce sums the ranks' shares
        for parameter in model[1:].parameters():
            dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    return torch.randint(24, (8, 5), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
