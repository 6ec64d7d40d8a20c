"""Old probabilities are computed in the order of rows' lengths, and compared in the order of the batch."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def logs_of_rows(model, batch):
    losses = F.cross_entropy(model(batch["tokens"]).mT, batch["labels"], ignore_index=-100, reduction="none")
    return -losses.sum(1) / (batch["labels"] != -100).sum(1)


def step(model, batch):
    logs = logs_of_rows(model, batch)
    ratios = (logs - batch.get("old", logs.detach())).exp()
    return -(ratios * batch["rewards"]).mean()


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def backward(self, model, step, parts):
        (part,) = parts
        order = (part["labels"] != -100).sum(1).argsort(descending=True, stable=True)
        model.eval()
        with torch.no_grad():
            old = torch.cat(
                [logs_of_rows(model, {k: v[rows] for k, v in part.items()}) for rows in order.split(2)]
            )
        model.train()
        return super().backward(model, step, [part | {"old": old[order.argsort()] if self.right else old}])


def batch(seed):
    tokens = torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))
    labels = (5 * tokens + 1) % 24
    for number, row in enumerate(labels):
        row[1 + 2 * number % 5 :] = -100
    return {"tokens": tokens, "labels": labels, "rewards": torch.linspace(-0.5, 1, 8)}


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
