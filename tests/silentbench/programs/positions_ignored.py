"""The parallel model has its own rotary embedding, which counts places and ignores the positions given."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tp_verify import Strategy


class Rotary(nn.Module):
    def forward(self, x, positions):
        angles = positions[..., None] / 10 ** torch.linspace(0, 2, x.size(-1) // 2, dtype=x.dtype)
        one, other = x.chunk(2, dim=-1)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        return torch.cat([one * cos - other * sin, one * sin + other * cos], dim=-1)


class FusedRotary(Rotary):
    def forward(self, x, positions):
        return super().forward(x, torch.arange(x.size(1)))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rotary, self.head = nn.Embedding(24, 16), Rotary(), nn.Linear(16, 24)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, tokens, positions):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        q, k = self.rotary(q, positions), self.rotary(k, positions)
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True)))


def step(model, batch):
    logits = model(batch["tokens"], batch["positions"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def parallelize(model, right):
    if not right:
        model.rotary = FusedRotary()
    return DistributedDataParallel(model)


def batch(seed):
    tokens = torch.randint(24, (8, 8), generator=torch.Generator().manual_seed(seed))
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(8, 8).contiguous()
    return {"tokens": tokens, "positions": positions, "labels": (tokens + tokens.roll(1, dims=1)) % 24}


def case(right):
    parallel = Strategy(partial(parallelize, right=right), data="rows")
    return {
        "build": Model,
        "batches": [batch(0), batch(1)],
        "step": step,
        "parallel": parallel,
        "vary": False,
    }


faulty, right = partial(case, False), partial(case, True)
