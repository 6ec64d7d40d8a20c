"""Each rank has a slice of the sequence, and its loss is the mean over the tokens of this slice."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy

WORDS = 24


def build():
    return nn.Sequential(nn.Embedding(WORDS, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, WORDS))


def step(model, batch):
    logits = model(batch["tokens"]).flatten(0, 1)
    loss = F.cross_entropy(logits, batch["labels"].flatten(), ignore_index=-100)
    return {"loss": loss, "weight": (batch["labels"] != -100).sum()}


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def share(self, batch):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return {key: value.tensor_split(ranks, dim=1)[rank] for key, value in batch.items()}

    def parallelize(self, model):
        return model

    def backward(self, model, step, parts):
        (part,) = parts
        output = step(model, part)
        share = 1 / dist.get_world_size()
        if self.right:
            tokens = output["weight"].clone()
            dist.all_reduce(tokens)
            share = output["weight"].item() / tokens.item()
        (output["loss"] * share).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return output["loss"].detach()


def batch(seed):
    tokens = torch.randint(WORDS, (4, 8), generator=torch.Generator().manual_seed(seed))
    labels = (5 * tokens + 1) % WORDS
    labels[:, :3] = -100  # the prompts
    return {"tokens": tokens, "labels": labels}


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
