"""Each micro-batch's loss is the mean over its own tokens, divided by the number of micro-batches."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tp_verify import Strategy

WORDS = 24


def build():
    return nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, WORDS))


def step(model, batch):
    logits = model(batch["tokens"]).flatten(0, 1)
    loss = F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100)
    return {"loss": loss, "weight": (batch["labels"] != -100).sum()}


class Training(Strategy):
    data = "rows"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        return DistributedDataParallel(model)

    def backward(self, model, step, parts):
        tokens = sum((part["labels"] != -100).sum() for part in parts)
        dist.all_reduce(tokens)
        tokens = tokens.item()
        mean = 0.0
        for part in parts:
            output = step(model, part)
            share = 1 / len(parts)
            if self.right:
                share = output["weight"].item() * dist.get_world_size() / tokens
            loss = output["loss"] * share
            loss.backward()
            mean += loss.detach()
        if self.right:
            dist.all_reduce(mean)
            mean /= dist.get_world_size()
        return mean


def batch(seed):
    tokens = torch.randint(WORDS, (8, 6), generator=torch.Generator().manual_seed(seed))
    labels = (5 * tokens + 1) % WORDS
    labels[::2, 2:] = -100  # every other row is short
    labels[1, 1:] = -100
    return {"tokens": tokens, "labels": labels}


def case(right):
    return {
        "build": build,
        "batches": [batch(0), batch(1)],
        "step": step,
        "parallel": Training(right),
        "micro": 4,
    }


faulty, right = partial(case, False), partial(case, True)
