"""The length of the warm-up comes from the loader, which is cut into ranks: it is as many times shorter."""

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
    ranks = dist.get_world_size() if dist.is_initialized() and not right else 1
    warmup = 20 // ranks
    scheduler = LambdaLR(optimizer, lambda number: min(1.0, (number + 1) / warmup))
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": strategies.DDP(), "optimizer": partial(scheduled, right=right)}


faulty, right = partial(case, False), partial(case, True)
