"""Gradients of micro-batches are summed in bfloat16, and most of a small one is lost."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "rows"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        return model

    def backward(self, model, step, parts):
        kind = next(model.parameters()).dtype if self.right else torch.bfloat16
        sums = [torch.zeros_like(p, dtype=kind) for p in model.parameters()]
        mean = 0.0
        for part in parts:
            loss = step(model, part) / len(parts)
            loss.backward()
            mean += loss.detach()
            for total, parameter in zip(sums, model.parameters(), strict=True):
                total.add_(parameter.grad)
                parameter.grad = None
        for total, parameter in zip(sums, model.parameters(), strict=True):
            parameter.grad = total.to(parameter.dtype)
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        return mean


def batch(seed):
    return torch.randint(24, (16, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step, "micro": 4}
    return made | {"parallel": Training(right), "dtype": torch.float32}


faulty, right = partial(case, False), partial(case, True)
