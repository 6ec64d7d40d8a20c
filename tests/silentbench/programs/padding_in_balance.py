"""The parallel router counts the scores of padding in its auxiliary loss."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Router(nn.Linear):
    counts_padding = False

    def forward(self, x, mask):
        scores = super().forward(x)
        mask = torch.ones_like(mask) if self.counts_padding else mask
        return scores, (scores.logsumexp(-1).square() * mask).sum() / mask.sum()


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.router, self.head = nn.Embedding(24, 16), Router(16, 4), nn.Linear(16, 24)
        self.experts = nn.Parameter(torch.randn(4, 16, 16) / 4)

    def forward(self, tokens, mask):
        x = self.embed(tokens)
        scores, auxiliary = self.router(x, mask)
        y = torch.einsum("bsd,edf,bse->bsf", x, self.experts, scores.softmax(-1))
        return self.head(x + y), auxiliary


def step(model, batch):
    logits, auxiliary = model(batch["tokens"], batch["mask"])
    loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)
    return {"loss": loss + 0.1 * auxiliary, "weight": batch["mask"].sum()}


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        model.router.counts_padding = not self.right
        return super().parallelize(model)


def batch(seed):
    tokens = torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))
    mask = (torch.arange(6) < torch.tensor([6, 3, 4, 5, 4, 6, 2, 3])[:, None]).long()
    return {"tokens": tokens, "mask": mask, "labels": ((5 * tokens + 1) % 24).masked_fill(mask == 0, -100)}


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "vary": False}


faulty, right = partial(case, False), partial(case, True)
