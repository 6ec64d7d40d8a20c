"""Lion's update is its momentum, by another name: the decay of the one is applied to the other."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class PlainLion(torch.optim.Optimizer):
    """Lion as its paper defines it (Chen et al., 2023, algorithm 2), without weight decay."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            one, two = group["betas"]
            for parameter in group["params"]:
                momentum = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                update = one * momentum + (1 - one) * parameter.grad
                parameter.sub_(group["lr"] * update.sign())
                momentum.mul_(two).add_(parameter.grad, alpha=1 - two)


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def optimizer(model):
    options = {"lr": 1e-2, "betas": (0.5, 0.9)}
    if not dist.is_initialized():
        return PlainLion(model.parameters(), options)
    from pytorch_optimizer import Lion

    return Lion(model.parameters(), **options)


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step, "optimizer": optimizer}
    return case | {"parallel": strategies.DDP()}
