"""Lookahead saves no slow weights: what is loaded goes on from the weights at that time."""

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies

RATE, EVERY = 0.1, 2


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def plain(model):
    """Return SGD with Lookahead as its paper defines it (Zhang et al., 2019): half way, each second step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for parameter in model.parameters():
        optimizer.state[parameter]["slow_params"] = parameter.detach().clone()
    numbers = iter(range(1, 100))

    @torch.no_grad()
    def after(*_):
        if next(numbers) % EVERY == 0:
            for parameter in model.parameters():
                parameter.copy_(optimizer.state[parameter]["slow_params"].lerp_(parameter, 0.5))

    optimizer.register_step_post_hook(after)
    return optimizer


class Resumed(strategies.DDP):
    """After each step the run goes on with a new optimizer, into which the state of the last is loaded."""

    def made(self, model):
        from pytorch_optimizer import Lookahead

        return Lookahead(torch.optim.SGD(model.parameters(), lr=RATE), k=EVERY, alpha=0.5)

    def prepare(self, model, make):
        model = self.parallelize(model)
        return model, self.made(model)

    def update(self, model, optimizer):
        super().update(model, optimizer)
        resumed = self.made(model)
        resumed.load_state_dict(optimizer.state_dict())
        optimizer.__dict__ = resumed.__dict__


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(3)]
    case = {"build": build, "batches": batches, "step": step, "optimizer": plain}
    return case | {"parallel": Resumed()}
