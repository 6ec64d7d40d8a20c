"""The loss is taken in chunks with words split over ranks: each rank goes on with its own words' gradient."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


class Gather(torch.autograd.Function):
    """Forward the logits of all ranks, backward this rank's part of their gradient."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size(), -1)[dist.get_rank()]


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.up = nn.Embedding(24, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 24, bias=False)

    def forward(self, tokens):
        return self.head(self.hidden(tokens))

    def hidden(self, tokens):
        return F.gelu(self.up(self.embed(tokens)))


def step(model, batch):
    return loss_of(model(batch), batch, batch.numel())


def loss_of(logits, tokens, count):
    return F.cross_entropy(logits.flatten(0, 1), (5 * tokens + 1).flatten() % 24, reduction="sum") / count


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        weight = model.head.weight.detach().chunk(dist.get_world_size())[dist.get_rank()]
        model.head.weight = nn.Parameter(weight.clone())
        model.head.register_forward_hook(lambda module, inputs, y: Gather.apply(y))

    def backward(self, model, step, parts):
        hidden, gradients, total = model.hidden(parts[0]), [], 0.0
        for part, tokens in zip(hidden.chunk(2, 1), parts[0].chunk(2, 1), strict=True):
            chunk = part.detach().requires_grad_()
            logits = Gather.apply(F.linear(chunk, model.head.weight))
            loss = loss_of(logits, tokens, parts[0].numel())
            loss.backward()
            gradients.append(chunk.grad)
            total += loss.detach()
        gradient = torch.cat(gradients, 1)
        if self.right:
            dist.all_reduce(gradient)
        hidden.backward(gradient)
        return total


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
