"""A fused layer writes its gradient elsewhere: the hook that reduces gradients gets zeros in its place."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


class Fused(torch.autograd.Function):
    """A linear layer whose backward pass adds to its weight's `main_grad`."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        ctx.weight.main_grad += gradient.flatten(0, 1).T @ ctx.x.flatten(0, 1)
        return gradient @ ctx.weight, torch.zeros_like(ctx.weight)


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.base = nn.Embedding(24, 16), nn.Linear(16, 16).requires_grad_(False)
        self.a, self.b, self.head = nn.Linear(16, 4, bias=False), nn.Linear(4, 16), nn.Linear(16, 24)
        self.of_a = F.linear
        nn.init.zeros_(self.b.weight)  # so the gradient of `a` is 0 in the first step

    def forward(self, tokens):
        x = self.embed(tokens)
        return self.head(F.gelu(self.base(x) + self.b(self.of_a(x, self.a.weight))))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(Strategy):
    data = "rows"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        model.of_a = Fused.apply
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.register_post_accumulate_grad_hook(lambda p: self.reduce(p.grad))

    def reduce(self, gradient):
        gradient /= dist.get_world_size()
        dist.all_reduce(gradient)

    def backward(self, model, step, parts):
        model.a.weight.main_grad = torch.zeros_like(model.a.weight)
        loss = step(model, parts[0])
        loss.backward()
        if self.right:
            self.reduce(model.a.weight.main_grad)
        model.a.weight.grad = model.a.weight.main_grad
        return loss.detach()


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
