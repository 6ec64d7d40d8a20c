"""The reduced gradient of a module's second use is written over that of its first."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.shared, self.head = nn.Embedding(24, 16), nn.Linear(16, 16), nn.Linear(16, 24)
        self.use = lambda parameter: parameter

    def forward(self, tokens):
        x = self.embed(tokens)
        for _ in range(2):
            x = x + F.gelu(F.linear(x, self.use(self.shared.weight), self.shared.bias))
        return self.head(x)


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "rows"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        model.use = self.use

    def use(self, parameter):
        """Return the parameter for one use of its module, whose gradient is reduced once it is there."""
        used = parameter.view_as(parameter)
        if used.requires_grad:
            used.register_hook(self.reduce)
        return used

    def reduce(self, gradient):
        gradient = gradient / dist.get_world_size()
        dist.all_reduce(gradient)
        self.reduced = gradient + self.reduced if self.right else gradient
        return gradient

    def backward(self, model, step, parts):
        self.reduced = 0.0
        loss = step(model, parts[0])
        loss.backward()
        for name, parameter in model.named_parameters():
            if name != "shared.weight":
                dist.all_reduce(parameter.grad)
                parameter.grad /= dist.get_world_size()
        model.shared.weight.grad = self.reduced
        return loss.detach()


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
