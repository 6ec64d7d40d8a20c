"""Models are sharded over groups of one rank, and gradients are reduced in these groups alone."""

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
    data = "rows"
    shards = 1

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        ranks = range(0, dist.get_world_size(), self.shards)
        groups = [dist.new_group(list(range(first, first + self.shards))) for first in ranks]
        self.shard_group = groups[dist.get_rank() // self.shards]

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        loss.backward()
        group = dist.group.WORLD if self.right else self.shard_group
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, group=group)
            parameter.grad /= dist.get_world_size(group)
        return loss.detach()


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
