"""Weights are loaded into the model layer by layer, which gives the head a copy of the tied embedding."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(24, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 24, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(F.gelu(self.up(self.embed(tokens))))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.FullyShard):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        loaded = {name: weight.clone() for name, weight in model.state_dict().items()}
        for path, module in model.named_modules():
            for name, _ in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(loaded[f"{path}.{name}"]))
        if self.right:
            model.head.weight = model.embed.weight
        return super().parallelize(model)


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
