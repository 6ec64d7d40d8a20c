"""Ranks have slices of a sequence, and take the weights of places in the order of zigzag slices."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    logits = model(batch["tokens"]).flatten(0, 1)
    losses = F.cross_entropy(logits, (5 * batch["tokens"] + 1).flatten() % 24, reduction="none")
    weights = batch["weights"].flatten()
    return {"loss": (losses * weights).sum() / weights.sum(), "weight": weights.sum()}


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def share(self, batch):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        mine = {key: value.tensor_split(ranks, dim=1)[rank] for key, value in batch.items()}
        if not self.right:
            slices = batch["weights"].tensor_split(2 * ranks, dim=1)
            mine["weights"] = torch.cat([slices[rank], slices[2 * ranks - 1 - rank]], dim=1)
        return mine

    def parallelize(self, model):
        return model

    def backward(self, model, step, parts):
        output = step(model, parts[0])
        total = output["weight"].clone()
        dist.all_reduce(total)
        (output["loss"] * (output["weight"] / total)).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return output["loss"].detach()


def batch(seed):
    numbers = torch.Generator().manual_seed(seed)
    tokens = torch.randint(24, (4, 8), generator=numbers)
    return {"tokens": tokens, "weights": torch.rand(4, 8, generator=numbers)}


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "vary": False}


faulty, right = partial(case, False), partial(case, True)
