"""Under context parallelism, a causal mask takes the place of the one that the layer was given."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_gather
from tp_verify import Strategy


class Attention(nn.Module):
    window, first = 3, 0

    def __init__(self):
        super().__init__()
        self.gather = lambda x: x

    def forward(self, q, k, v):
        k, v = self.gather(k), self.gather(v)
        behind = self.first + torch.arange(q.size(1))[:, None] - torch.arange(k.size(1))
        visible = (behind >= 0) & (behind < self.window)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=visible)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.attention, self.qkv, self.out = Attention(), nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.out(self.attention(*self.qkv(x).chunk(3, dim=-1))))


def gathered(x):
    parts = all_gather(x.contiguous())
    for part in parts if x.requires_grad else ():
        part.register_hook(lambda g: g if g is None else g.contiguous())  # see transposed_gradient.py
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
        model.attention.gather = gathered
        model.attention.first = 4 * dist.get_rank()
        if not self.right:
            model.attention.window = 8

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    tokens = torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "labels": (tokens + tokens.roll(1, dims=1)) % 24}


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "vary": False}


faulty, right = partial(case, False), partial(case, True)
