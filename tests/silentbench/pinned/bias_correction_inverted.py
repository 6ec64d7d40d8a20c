"""AdamG corrects its moments by what they lack, and not by what they have: early steps are off."""

import math

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class PlainAdamG(torch.optim.Optimizer):
    """AdamG as its paper defines it (Pan et al., 2024, algorithm 1), with the numerator ``p * x ** q``."""

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            group["step"] = number = group.get("step", 0) + 1
            one, two, three = group["betas"]
            for parameter in group["params"]:
                state, gradient = self.state[parameter], parameter.grad
                m, v, r = (state.setdefault(name, torch.zeros_like(parameter)) for name in "mvr")
                v.mul_(two).add_((1 - two) * gradient.square())
                r.mul_(three).add_((1 - three) * group["p"] * v ** group["q"])
                m.mul_(one).add_((1 - one) * r * gradient)
                ratio = (m / (1 - one**number)) / ((v / (1 - two**number)).sqrt() + group["eps"])
                parameter.sub_(min(group["lr"], 1 / math.sqrt(number)) * ratio)


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def optimizer(model):
    options = {"lr": 0.1, "betas": (0.9, 0.9, 0.9), "p": 0.5, "q": 0.25, "eps": 1e-8}
    if not dist.is_initialized():
        return PlainAdamG(model.parameters(), options)
    from pytorch_optimizer import AdamG

    return AdamG(model.parameters(), **options)


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step, "optimizer": optimizer}
    return case | {"parallel": strategies.DDP()}
