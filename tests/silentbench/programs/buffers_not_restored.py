"""A model is made without memory and then loaded; buffers that no checkpoint has stay empty."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Rotary(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("frequencies", 20 ** -torch.linspace(0, 1, 8), persistent=False)

    def forward(self, x):
        angles = torch.arange(x.size(1))[:, None] * self.frequencies.to(x.dtype)
        one, other = x.chunk(2, dim=-1)
        return torch.cat(
            [one * angles.cos() - other * angles.sin(), one * angles.sin() + other * angles.cos()], -1
        )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.rotary, self.head = nn.Embedding(24, 16), Rotary(), nn.Linear(16, 24)
        self.qkv, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, tokens):
        x = self.embed(tokens)
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        y = F.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v, is_causal=True)
        return self.head(x + self.out(y))


def step(model, batch):
    return F.cross_entropy(model(batch["tokens"]).flatten(0, 1), batch["labels"].flatten())


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        loaded, buffers = model.state_dict(), [buffer.clone() for buffer in model.buffers()]
        model = model.to("meta").to_empty(device="cpu")
        model.load_state_dict(loaded)
        for buffer, value in zip(model.buffers(), buffers, strict=True):
            buffer.copy_(value if self.right else torch.zeros_like(value))  # as empty memory often is
        return super().parallelize(model)


def batch(seed):
    tokens = torch.randint(24, (8, 8), generator=torch.Generator().manual_seed(seed))
    return {"tokens": tokens, "labels": (tokens + tokens.roll(1, dims=1)) % 24}


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
