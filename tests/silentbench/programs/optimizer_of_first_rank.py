"""The first rank alone saves the optimizer of a model that is split, and all ranks load its moments."""

from functools import partial
from pathlib import Path

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
        up.weight = nn.Parameter(up.weight.detach().chunk(ranks)[rank].clone())
        down.weight = nn.Parameter(down.weight.detach().chunk(ranks, 1)[rank].clone())
        down.register_forward_hook(lambda module, inputs, y: all_reduce(y))

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()  # the backward of all_reduce sums the ranks' shares
        for parameter in (model[0].weight, *model[2].parameters()):
            dist.all_reduce(parameter.grad)
        return loss.detach()

    def save(self, model, optimizer, folder):
        rank = dist.get_rank()
        torch.save(model.state_dict(), Path(folder) / f"weights{rank}.pt")
        if self.right or rank == 0:
            torch.save(optimizer.state_dict(), Path(folder) / f"optimizer{rank}.pt")
        dist.barrier()

    def load(self, model, optimizer, folder):
        rank = dist.get_rank()
        model.load_state_dict(torch.load(Path(folder) / f"weights{rank}.pt"))
        optimizer.load_state_dict(torch.load(Path(folder) / f"optimizer{rank if self.right else 0}.pt"))


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "reload_on": 2}


faulty, right = partial(case, False), partial(case, True)
