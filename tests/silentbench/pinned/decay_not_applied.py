"""SignSGD takes a weight decay, and applies none."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class PlainSignSGD(torch.optim.Optimizer):
    """Signum as its paper defines it (Bernstein et al., 2018, algorithm 2), with decoupled weight decay."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                momentum.lerp_(parameter.grad, 1 - group["momentum"])
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.sub_(group["lr"] * momentum.sign())


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def optimizer(model):
    options = {"lr": 1e-2, "momentum": 0.9, "weight_decay": 0.5}
    if not dist.is_initialized():
        return PlainSignSGD(model.parameters(), options)
    from pytorch_optimizer import SignSGD

    return SignSGD(model.parameters(), **options)


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step, "optimizer": optimizer}
    return case | {"parallel": strategies.DDP()}
