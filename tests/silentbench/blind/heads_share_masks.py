"""Heads of attention are split over ranks, and all ranks drop the same elements of their own heads."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from tp_verify import Strategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.q, self.k, self.v = (nn.Linear(16, 16, bias=False) for _ in range(3))
        self.out, self.of_heads, self.after = nn.Linear(16, 16, bias=False), nn.Dropout(0.3), nn.Dropout(0.3)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (layer(x).unflatten(-1, (-1, 4)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = self.of_heads((q @ k.mT / 2).softmax(-1)) @ v  # (batch, heads, places, 4)
        return self.head(x + self.after(self.out(y.transpose(1, 2).flatten(2))))


class DropoutOfRank(nn.Dropout):
    def forward(self, x):
        seed = int(torch.randint(2**31, ()))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed + dist.get_rank())
            return super().forward(x)


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (batch + batch.roll(1, dims=1)).flatten() % 24)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for layer in (model.q, model.k, model.v):
            layer.weight = nn.Parameter(layer.weight.detach().chunk(ranks)[rank].clone())
        model.out.weight = nn.Parameter(model.out.weight.detach().chunk(ranks, 1)[rank].clone())
        model.out.register_forward_hook(lambda module, inputs, y: all_reduce(y))
        if self.right:
            model.of_heads = DropoutOfRank(0.3)

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()  # the backward of all_reduce sums the ranks' shares
        for parameter in (model.embed.weight, *model.head.parameters()):
            dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "dropout": 100}


faulty, right = partial(case, False), partial(case, True)
