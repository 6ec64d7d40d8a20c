"""Keys of all ranks are gathered, and their gradient comes transposed: torch mixes up its elements."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from tp_verify import Strategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.gather = lambda x: x

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        scores = q @ self.gather(k).transpose(1, 2) / 4
        return self.head(x + self.out(scores.softmax(-1) @ self.gather(v)))


def gather(x, right):
    parts = all_gather(x.contiguous())
    for part in parts:
        if right and part.requires_grad:
            part.register_hook(torch.Tensor.contiguous)
    return torch.cat(parts, dim=1)


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
        model.gather = partial(gather, right=self.right)

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    tokens = torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "labels": (tokens + tokens.sum(1, keepdim=True)) % 24}


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "vary": False}


faulty, right = partial(case, False), partial(case, True)
