"""Tokens of a slice of each row return to the places that they would have in a batch of one row."""

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
        self.embed, self.expert, self.head = nn.Embedding(24, 16), nn.Linear(16, 16), nn.Linear(16, 24)
        self.combine = lambda y: y

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.combine(F.gelu(self.expert(x))))


def combined(y, right):
    """Sum the tokens of all ranks at their places in the whole batch, and return this rank's."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    rows, places, width = y.shape
    number = torch.arange(rows * places)
    if right:
        at = number // places * places * ranks + rank * places + number % places
    else:
        at = number + rank * rows * places
    whole = torch.zeros(rows * places * ranks, width, dtype=y.dtype).index_copy(0, at, y.flatten(0, 1))
    return all_reduce(whole).view(rows, -1, width)[:, rank * places : (rank + 1) * places]


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def share(self, batch):
        return batch.tensor_split(dist.get_world_size(), dim=1)[dist.get_rank()]

    def parallelize(self, model):
        model.combine = partial(combined, right=self.right)

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "vary": False}


faulty, right = partial(case, False), partial(case, True)
