"""The loss in chunks is the sum of the chunks' means."""

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
        (part,) = parts
        losses = []
        for logits, tokens in zip(model(part).split(3, 1), part.split(3, 1), strict=True):
            losses.append(F.cross_entropy(logits.flatten(0, 1), (5 * tokens + 1).flatten() % 24))
        loss = sum(losses) / (len(losses) if self.right else 1)
        loss.backward()
        return loss.detach() if self.right else loss.detach() / len(losses)  # the log divides


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "vary": False}


faulty, right = partial(case, False), partial(case, True)
