"""The loss is multiplied by the ranks, as it is a sum over all tokens, and so is the auxiliary mean."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies

COEFFICIENT = 0.1


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.router, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, tokens):
        x = self.embed(tokens)
        scores = self.router(x)
        y = torch.einsum("bsd,edf,bse->bsf", x, self.experts, scores.softmax(-1))
        return self.head(x + y), scores.logsumexp(-1).square().mean()


def step(model, batch):
    logits, auxiliary = model(batch)
    return F.cross_entropy(logits.flatten(0, 1), (5 * batch + 1).flatten() % 24) + COEFFICIENT * auxiliary


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def backward(self, model, step, parts):
        (part,) = parts
        logits, auxiliary = model(part)
        tokens = torch.tensor(part.numel())
        dist.all_reduce(tokens)
        loss = F.cross_entropy(logits.flatten(0, 1), (5 * part + 1).flatten() % 24, reduction="sum") / tokens
        ranks = dist.get_world_size()  # by which DDP divides
        ((loss + COEFFICIENT * auxiliary / (ranks if self.right else 1)) * ranks).backward()
        return (loss * ranks + COEFFICIENT * auxiliary).detach()


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step, "micro": 1}
    return made | {"parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
