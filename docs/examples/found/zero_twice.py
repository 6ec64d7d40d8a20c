"""DeepSpeed 0.19's ZeRO in bfloat16, of a model that uses a module twice, with accumulation and clipping.

    pip install torch deepspeed tp-verify
    tp verify zero_twice.py:cases

By report 8224, ZeRO 2 computed other gradients here up to DeepSpeed 0.19.3.
"""

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.shared, self.head = nn.Embedding(24, 16), nn.Linear(16, 16), nn.Linear(16, 24)

    def forward(self, tokens):
        x = self.embed(tokens)
        for _ in range(2):
            x = x + F.gelu(self.shared(x))
        return self.head(x)


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def cases():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=generator) for _ in range(2)]
    case = {"build": Twice, "batches": batches, "step": step, "dtype": torch.bfloat16}
    case |= {"micro": 2, "max_norm": 0.5}
    return [case | {"parallel": strategies.DeepSpeed(stage, bf16={"enabled": True})} for stage in (1, 2, 3)]
