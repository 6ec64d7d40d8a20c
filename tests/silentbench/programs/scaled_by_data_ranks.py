"""Loss sums are scaled by the ranks with other rows, but gradients averaged over all ranks."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def share(self, batch):
        return batch.tensor_split(dist.get_world_size(), dim=1)[dist.get_rank()]

    def parallelize(self, model):
        return model

    def backward(self, model, step, parts):
        (tokens,) = parts
        ranks, data_ranks = dist.get_world_size(), 1
        count = torch.tensor(tokens.numel())
        dist.all_reduce(count)
        loss = step(model, tokens)
        share = tokens.numel() / count.item() * (ranks if self.right else data_ranks)
        (loss * share).backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= ranks
        return loss.detach()


def batch(seed):
    return torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(seed))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step, "optimizer": sgd}
    return made | {"parallel": Training(right), "vary": False}


faulty, right = partial(case, False), partial(case, True)
