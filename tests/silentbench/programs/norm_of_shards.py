"""Under FSDP2, each rank clips by the norm of its own shards."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.FullyShard):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def clip(self, model, max_norm):
        if self.right:
            return super().clip(model, max_norm)
        shards = [parameter.grad.to_local() for parameter in model.parameters()]
        norm = nn.utils.get_total_norm(shards)
        for shard in shards:
            shard.mul_(min(1.0, max_norm / (float(norm) + 1e-6)))
        return norm


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step, "optimizer": sgd}
    return made | {"parallel": Training(right), "max_norm": 0.3}


faulty, right = partial(case, False), partial(case, True)
