"""Megatron-core 0.16's layers: an embedding, a column and a row layer, on gloo.

    pip install torch megatron-core tp-verify
    tp verify megatron_layers.py:cases

The second case sets ``disable_grad_reduce`` of the column layer: no rank has the whole gradient of its input.
"""

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify.strategies import Megatron


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, tokens):
        x = self.table(tokens)
        return self.head(x + self.down(F.gelu(self.up(x))))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


class NotReduced(Megatron):
    name = "megatron-core, disable_grad_reduce"

    def parallelize(self, model):
        super().parallelize(model)
        model.up.allreduce_dgrad, model.up.disable_grad_reduce = False, True
        return model


def cases():
    generator = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (4, 6), generator=generator) for _ in range(3)]
    case = {"build": Model, "batches": batches, "step": step, "max_norm": 0.5}
    plan = {"table": "vocab", "up": "column", "down": "row"}
    return [case | {"parallel": way(plan)} for way in (Megatron, NotReduced)]
