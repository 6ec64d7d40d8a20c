"""Each call of the schedule divides all gradients by its micro-batches, and those of earlier calls again."""

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
        loss = sum(self.call(model, step, part, len(parts)) for part in parts) / len(parts)
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        return loss

    def call(self, model, step, part, calls):
        """Run a schedule over the micro-batches of a call."""
        losses = []
        for micro in part.chunk(2):
            losses.append(step(model, micro))
            (losses[-1] / (2 * calls if self.right else calls)).backward()
        if not self.right:
            for parameter in model.parameters():
                parameter.grad /= 2
        return torch.stack(losses).mean().detach()


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step, "optimizer": sgd}
    return made | {"parallel": Training(right), "micro": 2}


faulty, right = partial(case, False), partial(case, True)
