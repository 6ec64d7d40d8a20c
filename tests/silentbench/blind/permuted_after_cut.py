"""A checkpoint has rotary weights in another order; ranks reorder their parts as if all heads were there."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from tp_verify import Strategy

HEADS = 4


def rotated(x):
    angles = torch.arange(x.shape[-2], dtype=x.dtype)[:, None] * 0.3 ** torch.arange(4, dtype=x.dtype)
    one, two = x.chunk(2, -1)
    return torch.cat([one * angles.cos() - two * angles.sin(), two * angles.cos() + one * angles.sin()], -1)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.q, self.k, self.v = (nn.Linear(16, 32, bias=False) for _ in range(3))
        self.out = nn.Linear(32, 16, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = (layer(x).unflatten(-1, (-1, 8)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(rotated(q), rotated(k), v, is_causal=True)
        return self.head(x + self.out(y.transpose(1, 2).flatten(2)))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (batch + batch.roll(1, dims=1)).flatten() % 24)


def stored(weight):
    return weight.unflatten(0, (HEADS, 2, -1)).transpose(1, 2).flatten(0, 2)


def loaded(weight):
    return weight.unflatten(0, (HEADS, -1, 2)).transpose(1, 2).flatten(0, 2)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        for layer in (model.q, model.k):
            whole = stored(layer.weight.detach())
            part = loaded(whole).chunk(ranks)[rank] if self.right else loaded(whole.chunk(ranks)[rank])
            layer.weight = nn.Parameter(part.clone())
        model.v.weight = nn.Parameter(model.v.weight.detach().chunk(ranks)[rank].clone())
        model.out.weight = nn.Parameter(model.out.weight.detach().chunk(ranks, 1)[rank].clone())
        model.out.register_forward_hook(lambda module, inputs, y: all_reduce(y))

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()  # the backward of all_reduce sums the ranks' shares
        for parameter in (model.embed.weight, *model.head.parameters()):
            dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
