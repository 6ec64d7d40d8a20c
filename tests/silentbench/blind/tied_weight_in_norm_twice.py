"""The first and the last pipeline stage have one weight together, and both count it in the norm."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.first, self.second = nn.Embedding(24, 16), nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, tokens):
        return self.logits(F.gelu(self.first(self.embed(tokens))))

    def logits(self, hidden):
        return F.linear(F.gelu(self.second(hidden)), self.embed.weight)


def step(model, batch):
    return loss_of(model(batch), batch)


def loss_of(logits, tokens):
    return F.cross_entropy(logits.flatten(0, 1), (5 * tokens + 1).flatten() % 24)


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        delattr(model, "first" if dist.get_rank() else "second")

    def backward(self, model, step, parts):
        (tokens,), loss = parts, torch.tensor(float("nan"))
        if dist.get_rank() == 0:
            hidden = F.gelu(model.first(model.embed(tokens)))
            gradient = torch.empty_like(hidden)
            dist.send(hidden.detach(), 1)
            dist.recv(gradient, 1)
            hidden.backward(gradient)
        else:
            hidden = torch.empty(*tokens.shape, 16, dtype=model.embed.weight.dtype, requires_grad=True)
            dist.recv(hidden.data, 0)
            loss = loss_of(model.logits(hidden), tokens)
            loss.backward()
            dist.send(hidden.grad, 0)
        dist.all_reduce(model.embed.weight.grad)
        return loss.detach()

    def clip(self, model, max_norm):
        square = sum(parameter.grad.square().sum() for parameter in model.parameters())
        if self.right and dist.get_rank():
            square -= model.embed.weight.grad.square().sum()
        dist.all_reduce(square)
        for parameter in model.parameters():
            parameter.grad *= (max_norm / (square.sqrt() + 1e-6)).clamp(max=1.0)
        return square.sqrt()

    def evaluate(self, model, step, share):
        return None


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step, "optimizer": sgd}
    return made | {"parallel": Training(right), "max_norm": 0.1}


faulty, right = partial(case, False), partial(case, True)
