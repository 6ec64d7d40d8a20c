"""ADOPT divides a gradient by a moment that has it already, and not by that of the step before."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class PlainADOPT(torch.optim.Optimizer):
    """ADOPT as its paper defines it (Taniguchi et al., 2024); its first step is for the moment alone."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            one, two = group["betas"]
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(gradient), gradient.square()
                    continue
                ratio = gradient / state["exp_avg_sq"].sqrt().clamp(min=group["eps"])
                state["exp_avg"].mul_(one).add_(ratio, alpha=1 - one)
                parameter.sub_(group["lr"] * state["exp_avg"])
                state["exp_avg_sq"].mul_(two).add_(gradient.square(), alpha=1 - two)


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def optimizer(model):
    options = {"lr": 1e-3, "betas": (0.9, 0.99), "eps": 1e-3}
    if not dist.is_initialized():
        return PlainADOPT(model.parameters(), options)
    from pytorch_optimizer import ADOPT

    return ADOPT(model.parameters(), clip_lambda=None, **options)


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(3)]
    case = {"build": build, "batches": batches, "step": step, "optimizer": optimizer}
    return case | {"parallel": strategies.DDP()}
