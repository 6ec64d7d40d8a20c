"""Under context parallelism, each rank counts the places of its slice of the sequence from 0."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(24, 16), nn.Embedding(16, 16)
        self.up, self.head = nn.Linear(16, 32), nn.Linear(32, 24)
        self.rank = 0

    def forward(self, tokens):
        places = torch.arange(tokens.size(1)) + self.rank * tokens.size(1)
        return self.head(F.gelu(self.up(self.embed(tokens) + self.places(places))))


def step(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def share(self, batch):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return {key: value.tensor_split(ranks, dim=1)[rank] for key, value in batch.items()}

    def parallelize(self, model):
        if self.right:
            model.rank = dist.get_rank()

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    tokens = torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "labels": (tokens + torch.arange(8)) % 24}


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "vary": False}


faulty, right = partial(case, False), partial(case, True)
