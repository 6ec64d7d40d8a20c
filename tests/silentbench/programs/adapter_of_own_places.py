"""Under sequence parallelism an adapter sees a slice of the places, and lacks the mark that has it summed."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


class Adapted(nn.Linear):
    def __init__(self):
        super().__init__(16, 16)
        self.requires_grad_(False)
        self.a, self.b = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, x):
        return F.gelu(super().forward(x)) + self.b(self.a(x))


def build():
    return nn.Sequential(nn.Embedding(24, 16), Adapted(), nn.Linear(16, 24))


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
        for parameter in model.parameters():
            parameter.sequence_parallel = True
        model[1].a.weight.sequence_parallel = self.right

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        (loss / dist.get_world_size()).backward()
        for parameter in model.parameters():
            if parameter.sequence_parallel and parameter.requires_grad:
                dist.all_reduce(parameter.grad)
        return loss.detach()


def batch(seed):
    return torch.randint(24, (4, 8), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "vary": False}


faulty, right = partial(case, False), partial(case, True)
