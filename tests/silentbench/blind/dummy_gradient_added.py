"""A weight is used by a fused layer and by another one, and the fused one's dummy gradient is added, too."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


class Fused(torch.autograd.Function):
    """A linear layer whose backward pass adds to `main_grad`, and returns memory that nobody has cleared."""

    is_cleared = True

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        of_weight = gradient.flatten(0, 1).T @ ctx.x.flatten(0, 1)
        ctx.weight.main_grad += of_weight
        of_input = gradient @ ctx.weight
        return of_input, of_weight.zero_() if Fused.is_cleared else of_weight


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up, self.project = nn.Embedding(24, 16), nn.Linear(16, 16), F.linear

    def forward(self, tokens):
        return self.project(F.gelu(self.up(self.embed(tokens))), self.embed.weight)


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "rows"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        model.project = Fused.apply

    def backward(self, model, step, parts):
        Fused.is_cleared = self.right
        weight = model.embed.weight
        weight.main_grad = torch.zeros_like(weight)
        loss = step(model, parts[0])
        loss.backward()
        weight.grad = weight.main_grad + weight.grad
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        return loss.detach()


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
