"""An epoch ends with fewer micro-batches, and each is divided by the usual number of them."""

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
    accumulate, rows = 4, 2

    def __init__(self, right):
        super().__init__()
        self.right = right

    def backward(self, model, step, parts):
        micro_batches, mean = parts[0].split(self.rows), 0.0
        for number, part in enumerate(micro_batches):
            self.sync_gradients(model, last=number == len(micro_batches) - 1)
            loss = step(model, part)
            (loss / (len(micro_batches) if self.right else self.accumulate)).backward()
            mean += loss.detach() / len(micro_batches)
        return mean


def batch(seed):
    rows = 8 if seed % 4 == 1 else 16  # the last one of an epoch is smaller
    return torch.randint(24, (rows, 6), generator=torch.Generator().manual_seed(seed))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "optimizer": sgd}


faulty, right = partial(case, False), partial(case, True)
