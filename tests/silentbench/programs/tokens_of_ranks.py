"""Each rank's loss is the mean over its own tokens, and DDP averages ranks: few tokens count as many."""

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
        (part,) = parts
        output = step(model, part)
        scale = 1.0
        if self.right:
            tokens = output["weight"].clone()
            dist.all_reduce(tokens)
            scale = float(output["weight"] * dist.get_world_size() / tokens)
        (output["loss"] * scale).backward()
        return output["loss"].detach()


def batch(seed):
    tokens = torch.randint(WORDS, (8, 6), generator=torch.Generator().manual_seed(seed))
    labels = (5 * tokens + 1) % WORDS
    labels[:3, 2:] = -100  # the prompts
    return {"tokens": tokens, "labels": labels}


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
