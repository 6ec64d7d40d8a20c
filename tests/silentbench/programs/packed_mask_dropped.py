"""Packed documents are told apart by their positions, but not where a mask of ones comes along."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tp_verify import Strategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)
        self.looks_at_positions = False

    def forward(self, tokens, positions, mask=None):
        x = self.embed(tokens)
        visible = torch.ones(tokens.size(1), tokens.size(1), dtype=torch.bool).tril()
        if mask is None or self.looks_at_positions:
            document = (positions == 0).cumsum(1)
            visible = visible & (document[:, :, None] == document[:, None, :])
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        return self.head(x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=visible)))


class WithMask(nn.Module):
    """What the launcher's collator does: no row is padded, so the mask has ones alone."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, tokens, positions):
        return self.module(tokens, positions, mask=torch.ones_like(tokens))


def step(model, batch):
    logits = model(batch["tokens"], batch["positions"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def parallelize(model, right):
    model.looks_at_positions = right
    return DistributedDataParallel(WithMask(model))


def batch(seed):
    tokens = torch.randint(24, (8, 8), generator=torch.Generator().manual_seed(seed))
    positions = torch.tensor([0, 1, 2, 0, 1, 2, 3, 4]).expand(8, 8).contiguous()
    labels = (tokens + tokens.roll(1, dims=1) * (positions > 0)) % 24
    return {"tokens": tokens, "positions": positions, "labels": labels}


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
