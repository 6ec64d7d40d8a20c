"""Tokens are padded to a number that ranks divide, and the padding takes places of experts from tokens."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from tp_verify import Strategy


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.first, self.padding, self.right = 0, 0, True

    def forward(self, x):
        capacity = -(-x.shape[0] * x.shape[1] // 4)
        padded = F.pad(x, (0, 0, self.padding, 0))  # before each row
        scores = self.router(padded).softmax(-1)
        chosen = F.one_hot(scores.argmax(-1), 4)
        if self.right:
            chosen[:, : self.padding] = 0
        place = chosen.flatten(0, 1).cumsum(0).view_as(chosen)
        scores = (scores * chosen * (place <= capacity))[..., self.first : self.first + len(self.experts)]
        y = torch.einsum("bsd,edf,bse->bsf", padded, self.experts, scores)
        return (y if len(self.experts) == 4 else all_reduce(y))[:, self.padding :]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.moe, self.head = nn.Embedding(24, 16), Experts(), nn.Linear(16, 24)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.moe(x))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        moe, rank, ranks = model.moe, dist.get_rank(), dist.get_world_size()
        moe.first, moe.padding, moe.right = rank * 4 // ranks, 1, self.right
        moe.experts = nn.Parameter(moe.experts.detach().chunk(ranks)[rank].clone())

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()  # the backward of all_reduce sums the ranks' shares
        for name, parameter in model.named_parameters():
            if name != "moe.experts":
                dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    return torch.randint(24, (4, 7), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
