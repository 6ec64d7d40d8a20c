"""The parallel router attaches the auxiliary loss to its scores, and drops what this returns."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tp_verify import strategies

COEFFICIENT = 0.1


class Attach(torch.autograd.Function):
    """Forward the scores, backward also the gradient of a loss beside them."""

    @staticmethod
    def forward(ctx, scores, loss):
        return scores.view_as(scores)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, torch.ones((), dtype=gradient.dtype)


class Router(nn.Linear):
    right = None  # on one device the step adds the loss

    def forward(self, x):
        scores = super().forward(x)
        auxiliary = COEFFICIENT * scores.logsumexp(-1).square().mean()
        if self.right is not None:
            attached = Attach.apply(scores, auxiliary)
            scores = attached if self.right else scores
            auxiliary = auxiliary.detach()
        return scores, auxiliary


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.router, self.head = nn.Embedding(24, 16), Router(16, 4), nn.Linear(16, 24)
        self.experts = nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, tokens):
        x = self.embed(tokens)
        scores, auxiliary = self.router(x)
        y = torch.einsum("bsd,edf,bse->bsf", x, self.experts, scores.softmax(-1))
        return self.head(x + y), auxiliary


def step(model, batch):
    logits, auxiliary = model(batch)
    return F.cross_entropy(logits.flatten(0, 1), (5 * batch + 1).flatten() % 24) + auxiliary


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        model.router.right = self.right
        return DistributedDataParallel(model)

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        loss.backward()
        return loss.detach()


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": Model, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
