"""SGDW takes the same number from all weights as their decay, and no share of each, in all versions."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies

RATE, DECAY = 0.1, 0.5


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


@torch.no_grad()
def decay(optimizer, *_):
    """Decay as the paper defines it (Loshchilov and Hutter, 2019, algorithm 1), before the step."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.mul_(1 - RATE * DECAY)


def optimizer(model, its_own):
    """Return SGD on one device, and SGDW on ranks; it decays by the hook, or with ``its_own`` by itself."""
    if not dist.is_initialized():
        made = torch.optim.SGD(model.parameters(), lr=RATE, momentum=0.9)
    else:
        from torch_optimizer import SGDW

        own = DECAY if its_own else 0.0
        made = SGDW(model.parameters(), lr=RATE, momentum=0.9, weight_decay=own)
        if its_own:
            return made
    made.register_step_pre_hook(decay)
    return made


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step, "parallel": strategies.DDP()}
    return [case | {"optimizer": partial(optimizer, its_own=its_own)} for its_own in (True, False)]
