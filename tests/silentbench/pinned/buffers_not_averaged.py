"""An average of a model looks for buffers among the parameters, and finds none: they stay as at first.

A later version still leaves out all that is in bfloat16.
"""

import copy

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Centered(nn.Module):
    """Subtracts the running mean of what ranks have, in a buffer."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(16))

    def forward(self, x):
        if self.training:
            mean = x.detach().mean((0, 1))
            if dist.is_initialized():
                dist.all_reduce(mean)
                mean /= dist.get_world_size()
            self.center.lerp_(mean, 0.5)
        return x - self.center


class Averaged(nn.Module):
    """A network that trains, and its average, which is evaluated."""

    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Embedding(24, 16), Centered(), nn.Linear(16, 24))
        self.average = copy.deepcopy(self.net).requires_grad_(False)

    def forward(self, tokens):
        return self.net(tokens) if self.training else self.average(tokens)


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def plain(model):
    """Return SGD, after each step of which all that floats is averaged; the first two begin the average."""
    optimizer = torch.optim.SGD(model.net.parameters(), lr=0.5)
    weights = iter([1.0, 1.0])

    def after(*_):
        weight = next(weights, 0.5)
        trained = model.net.state_dict()
        for name, mine in model.average.state_dict().items():
            mine.lerp_(trained[name], weight)

    optimizer.register_step_post_hook(after)
    return optimizer


class Average(strategies.DDP):
    def prepare(self, model, make):
        from ema_pytorch import EMA

        options = {"beta": 0.5, "min_value": 0.5, "update_after_step": 0, "update_every": 1}
        self.ema = EMA(model.net, ema_model=model.average, **options)
        return self.parallelize(model), torch.optim.SGD(model.net.parameters(), lr=0.5)

    def update(self, model, optimizer):
        super().update(model, optimizer)
        self.ema.update()


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(4)]
    case = {"build": Averaged, "batches": batches, "step": step, "optimizer": plain, "parallel": Average()}
    return [case | {"dtype": torch.float32}, case | {"dtype": torch.bfloat16}]
