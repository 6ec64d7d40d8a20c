"""Ranger21 decays weights by the rate that was asked for, and not by that of its warm-up."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies

RATE, WARM_UP = 0.1, 50


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def optimizer(model):
    """Return Ranger21; on one device, with the decay that its paper defines, by the rate of the step."""
    from pytorch_optimizer import Ranger21

    class Decayed(Ranger21):
        def apply_weight_decay(self, p, *, weight_decay, ratio, **_):
            (group,) = self.param_groups
            rate = RATE * min(1.0, group["step"] / WARM_UP)
            p.mul_(1 - rate * weight_decay * ratio)

    made = Ranger21 if dist.is_initialized() else Decayed
    options = {"num_iterations": 100, "num_warm_up_iterations": WARM_UP, "weight_decay": 0.5}
    return made(model.parameters(), lr=RATE, **options)


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step, "optimizer": optimizer}
    return case | {"parallel": strategies.DDP()}
