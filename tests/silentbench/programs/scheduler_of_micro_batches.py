"""The scheduler steps at each micro-batch, and its length counts optimizer steps."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def scheduled(model, right):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    times = 2 if dist.is_initialized() and not right else 1  # as many as a step has micro-batches
    scheduler = LambdaLR(optimizer, lambda number: max(0.1, 1 - number / 120))

    def step_scheduler(*_):
        for _ in range(times):
            scheduler.step()

    optimizer.register_step_post_hook(step_scheduler)
    return optimizer


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step, "micro": 2}
    return made | {"parallel": strategies.DDP(), "optimizer": partial(scheduled, right=right)}


faulty, right = partial(case, False), partial(case, True)
