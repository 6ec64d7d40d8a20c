"""Gradients are copied to float32 for the optimizer before ranks reduce the ones in low precision."""

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

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        return model

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        loss.backward()
        copies = [p.grad.to(torch.promote_types(p.dtype, torch.float32)) for p in model.parameters()]
        reduced = copies if self.right else [p.grad.clone() for p in model.parameters()]
        for gradient in reduced:
            dist.all_reduce(gradient)
            gradient.div_(dist.get_world_size())
        for parameter, copy in zip(model.parameters(), copies, strict=True):
            parameter.grad = copy.to(parameter.dtype)  # what the optimizer steps with
        return loss.detach()


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
