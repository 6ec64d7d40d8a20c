"""The loss in chunks is the mean of the chunks' means, which have unequally many labels."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    logits = model(batch["tokens"]).flatten(0, 1)
    loss = F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100)
    return {"loss": loss, "weight": (batch["labels"] != -100).sum()}


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def backward(self, model, step, parts):
        (part,) = parts
        logits, labels = model(part["tokens"]).split(3, 1), part["labels"].split(3, 1)
        count = (part["labels"] != -100).sum()
        loss = 0.0
        for one, mine in zip(logits, labels, strict=True):
            total = F.cross_entropy(one.flatten(0, 1), mine.flatten(), ignore_index=-100, reduction="sum")
            loss = loss + total / (count if self.right else (mine != -100).sum() * len(logits))
        loss.backward()
        return loss.detach()


def batch(seed):
    tokens = torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))
    labels = (5 * tokens + 1) % 24
    labels[:, :2] = -100  # the prompts
    return {"tokens": tokens, "labels": labels}


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
