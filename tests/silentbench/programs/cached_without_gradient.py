"""A weight is cast in a pass without gradients, and the same cast serves the next one with gradients."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Shared(nn.Linear):
    casts, right = False, True

    def forward(self, x):
        if not self.casts:
            return super().forward(x)
        if self.cast is None or (self.right and torch.is_grad_enabled() != self.cast.requires_grad):
            self.cast = self.weight.clone()
        return F.linear(x, self.cast, self.bias)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.shared, self.head = nn.Embedding(24, 16), Shared(16, 16), nn.Linear(16, 24)

    def forward(self, tokens):
        x, self.shared.cast = self.embed(tokens), None  # as autocast forgets its casts at its end
        with torch.no_grad():
            target = self.shared(x)
        return self.head(F.gelu(self.shared(x)) + target)


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__(find_unused_parameters=True)
        self.right = right

    def parallelize(self, model):
        model.shared.casts, model.shared.right = True, self.right
        return super().parallelize(model)


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
