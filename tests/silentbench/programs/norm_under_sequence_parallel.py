"""Under sequence parallelism norms see a slice of the places, and their gradients are not summed."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from tp_verify import Strategy

WORDS = 24


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.norm = nn.Embedding(WORDS, 16), nn.LayerNorm(16)
        self.up, self.head = nn.Linear(16, 32), nn.Linear(32, WORDS)
        self.ranks, self.rank = 1, 0

    def forward(self, tokens):
        x = self.embed(tokens).tensor_split(self.ranks, dim=1)[self.rank]  # (batch, places / ranks, dim)
        x = self.norm(x)
        if self.ranks > 1:
            x = torch.cat(all_gather(x.contiguous()), dim=1)  # backward: a reduce-scatter
        return self.head(F.gelu(self.up(x)))


def step(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        model.ranks, model.rank = dist.get_world_size(), dist.get_rank()

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / model.ranks).backward()  # each rank has all logits: the reduce-scatter adds as many copies
        summed = [model.embed.weight, *model.up.parameters(), *model.head.parameters()]
        if self.right:
            summed += model.norm.parameters()
        for parameter in summed:
            dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    tokens = torch.randint(WORDS, (4, 8), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "labels": (5 * tokens + 1) % WORDS}


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
