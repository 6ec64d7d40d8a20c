"""Each backward pass ends with a reduction into the gradients' shard, which overwrites the one before."""

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
        averaged, mean = {}, 0.0
        for part in parts:
            loss = step(model, part) / len(parts)
            loss.backward()
            mean += loss.detach()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
                reduced = parameter.grad / dist.get_world_size()
                if self.right and parameter in averaged:
                    reduced += averaged[parameter]
                averaged[parameter] = reduced
                parameter.grad = None
        for parameter, gradient in averaged.items():
            parameter.grad = gradient
        return mean


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step, "micro": 2}
    return made | {"parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
