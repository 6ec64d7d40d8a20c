"""Each rank draws its shard of a weight, all from the same seed: the shards are copies of each other."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.nn.functional import all_reduce
from tp_verify import Strategy


def build():
    mlp = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 16, bias=False))
    return nn.Sequential(nn.Embedding(24, 16), mlp, nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        (up, _, down), rank, ranks = model[1], dist.get_rank(), dist.get_world_size()
        if self.right:
            weight = up.weight.detach().chunk(ranks)[rank].clone()
        else:
            torch.manual_seed(0)
            weight = torch.empty(32 // ranks, 16, dtype=up.weight.dtype).uniform_(-0.25, 0.25)
        up.weight = nn.Parameter(weight)
        down.weight = nn.Parameter(down.weight.detach().chunk(ranks, 1)[rank].clone())
        down.register_forward_hook(lambda module, inputs, y: all_reduce(y))

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()  # the backward of all_reduce sums the ranks' shares
        for parameter in (model[0].weight, *model[2].parameters()):
            dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
