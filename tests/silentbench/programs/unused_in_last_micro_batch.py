"""Parameters are reduced that the last micro-batch used, and not those that one before it used."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other, self.head = nn.Linear(8, 16), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x, kinds):
        y = torch.zeros(len(x), 16, dtype=x.dtype)
        for kind, layer in enumerate([self.one, self.other]):
            rows = (kinds == kind).nonzero().flatten()
            if len(rows):
                y = y.index_add(0, rows, layer(x[rows]))
        return self.head(y)


def step(model, batch):
    return F.mse_loss(model(batch["x"], batch["kinds"]), batch["x"].square())


class Training(Strategy):
    data = "rows"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        self.used = set()
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self.used.add)

    def backward(self, model, step, parts):
        mean = 0.0
        for part in parts:
            if not self.right:
                self.used.clear()  # at each forward pass
            loss = step(model, part) / len(parts)
            loss.backward()
            mean += loss.detach()
        for parameter in model.parameters():
            if parameter in self.used:
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        self.used.clear()
        return mean


def batch(seed):
    x = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "kinds": torch.tensor([0, 0, 1, 1, 0, 0, 1, 1])}  # one kind in each micro-batch


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step, "micro": 2}
    return made | {"parallel": Training(right), "vary": False}


faulty, right = partial(case, False), partial(case, True)
