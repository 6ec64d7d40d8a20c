"""Ranks of one sequence-parallel group shuffle rows by their own seeds, and attend to keys of other rows."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from tp_verify import Strategy


def gathered(x):
    parts = all_gather(x.contiguous())
    for part in parts if x.requires_grad else ():
        part.register_hook(torch.Tensor.contiguous)  # see transposed_gradient.py
    return parts


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.is_split = False

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.is_split:
            k, v = (torch.cat(gathered(t), dim=1) for t in (k, v))
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v)))


def step(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def share(self, batch):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        generator = torch.Generator().manual_seed(0 if self.right else rank)
        order = torch.randperm(len(batch["tokens"]), generator=generator)
        return {key: value[order].tensor_split(ranks, dim=1)[rank] for key, value in batch.items()}

    def parallelize(self, model):
        model.is_split = True

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
