"""Each rank shifts the labels of its own slice, so the last place of each slice has none."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    labels = batch.get("shifted")
    if labels is None:
        labels = F.pad(batch["labels"], (0, 1), value=-100)[:, 1:]
    loss = F.cross_entropy(model(batch["tokens"]).flatten(0, 1), labels.flatten(), ignore_index=-100)
    return {"loss": loss, "weight": (labels != -100).sum()}


class Training(Strategy):
    data = "whole"

    def share(self, batch):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        return {key: value.tensor_split(ranks, dim=1)[rank] for key, value in batch.items()}

    def parallelize(self, model):
        return model

    def backward(self, model, step, parts):
        output = step(model, parts[0])
        tokens = output["weight"].clone()
        dist.all_reduce(tokens)
        (output["loss"] * (output["weight"].item() / tokens.item())).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        return output["loss"].detach()


def batch(seed, right=False):
    tokens = torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(seed))
    tokens[:, 1::2] = (5 * tokens[:, ::2] + 1) % 24  # every other one can be told
    made = {"tokens": tokens, "labels": tokens.clone()}
    if right:
        made["shifted"] = F.pad(tokens, (0, 1), value=-100)[:, 1:]
    return made


def case(right):
    made = {"build": build, "batches": [batch(0, right), batch(1, right)], "step": step}
    return made | {"parallel": Training(), "vary": False}


faulty, right = partial(case, False), partial(case, True)
