"""Gradients are reduced after the first micro-batch of a step, and not after the last one."""

from contextlib import nullcontext
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def backward(self, model, step, parts):
        mean, last = 0.0, len(parts) - 1
        for number, part in enumerate(parts):
            is_reduced = number == (last if self.right else 0)
            with nullcontext() if is_reduced else model.no_sync():
                loss = step(model, part) / len(parts)
                loss.backward()
            mean += loss.detach()
        return mean


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "micro": 2}


faulty, right = partial(case, False), partial(case, True)
