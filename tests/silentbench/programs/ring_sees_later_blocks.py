"""Ring attention masks the block of its own rank, and takes the blocks of later ranks whole."""

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
        self.attend = partial(F.scaled_dot_product_attention, is_causal=True)

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.out(self.attend(*self.qkv(x).chunk(3, dim=-1))))


def gathered(x):
    parts = all_gather(x.contiguous())
    for part in parts if x.requires_grad else ():
        part.register_hook(lambda g: g if g is None else g.contiguous())  # see transposed_gradient.py
    return parts


def ring(q, k, v, right):
    rank, outputs, sums = dist.get_rank(), [], []
    keys, values = gathered(k), gathered(v)
    for block in range(dist.get_world_size()):
        if right and block > rank:
            continue
        scores = q @ keys[block].transpose(1, 2) / 4
        if block == rank:
            scores = scores + torch.full_like(scores, float("-inf")).triu(1)
        sums.append(scores.logsumexp(-1, keepdim=True))
        outputs.append(scores.softmax(-1) @ values[block])
    shares = torch.cat(sums, dim=-1).softmax(-1)
    return sum(output * shares[..., i : i + 1] for i, output in enumerate(outputs))


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
        model.attend = partial(ring, right=self.right)

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
    made = {"build": Model, "batches": [batch(0), batch(1)], "vary": False}
    return made | {"step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
