"""Label smoothing takes the mean over the words of the rank, and not over all words."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import Strategy


class Copy(torch.autograd.Function):
    """Forward nothing, backward an all-reduce."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        gradient = gradient.clone()
        dist.all_reduce(gradient)
        return gradient


class Gather(torch.autograd.Function):
    """Forward the logits of all ranks, backward this rank's part of their gradient."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.chunk(dist.get_world_size(), -1)[dist.get_rank()]


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 24, bias=False))


def step(model, batch):
    return loss_of(model(batch), batch, slice(None))


def loss_of(logits, tokens, words):
    chances = logits.flatten(0, 1).log_softmax(-1)
    return 0.8 * F.nll_loss(chances, (5 * tokens + 1).flatten() % 24) - 0.2 * chances[:, words].mean()


class Training(Strategy):
    data = "whole"

    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        rank, ranks = dist.get_rank(), dist.get_world_size()
        model[3].weight = nn.Parameter(model[3].weight.detach().chunk(ranks)[rank].clone())
        model[3].register_forward_pre_hook(lambda module, inputs: Copy.apply(inputs[0]))

    def backward(self, model, step, parts):
        own = slice(12 * dist.get_rank(), 12 * dist.get_rank() + 12)
        loss = loss_of(Gather.apply(model(parts[0])), parts[0], slice(None) if self.right else own)
        loss.backward()
        return loss.detach()

    def evaluate(self, model, step, share):
        return None


def batch(seed):
    return torch.randint(24, (4, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
