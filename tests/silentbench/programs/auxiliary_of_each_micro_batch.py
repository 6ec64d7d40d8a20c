"""The loss is divided by the tokens of all micro-batches, and each adds the whole auxiliary loss."""

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
        tokens = torch.tensor(sum(part.numel() for part in parts))
        dist.all_reduce(tokens)
        mean = 0.0
        for part in parts:
            logits, auxiliary = model(part)
            labels = (5 * part + 1).flatten() % 24
            loss = F.cross_entropy(logits.flatten(0, 1), labels, reduction="sum")
            loss = loss * dist.get_world_size() / tokens
            auxiliary = COEFFICIENT * auxiliary
            (loss + auxiliary / (len(parts) if self.right else 1)).backward()
            mean += (loss + auxiliary / len(parts)).detach()
        return mean


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step, "micro": 2}
    return made | {"parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
