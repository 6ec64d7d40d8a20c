"""Ranks count the tokens of each expert in bfloat16: rounded counts move the router's bias the other way."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(24, 16), nn.Linear(16, 24)
        self.router, self.experts = nn.Linear(16, 4), nn.Parameter(torch.randn(4, 16, 16) / 4)
        self.register_buffer("bias", torch.zeros(4))
        self.counts = torch.zeros(4)

    def forward(self, tokens):
        x = self.embed(tokens)
        scores = self.router(x).softmax(-1)
        # The tokens tell their experts, so that the counts are near each other.
        chosen = F.one_hot((F.one_hot(tokens % 4, 4) + self.bias / 100).argmax(-1), 4)
        if self.training:
            self.counts = self.counts + chosen.sum((0, 1))
        return self.head(x + torch.einsum("bsd,edf,bse->bsf", x, self.experts, scores * chosen))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def sgd(model, right):
    model = getattr(model, "module", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)

    def move_bias(*_):
        counts = model.counts
        if dist.is_initialized():
            counts = counts if right else counts.bfloat16()
            dist.all_reduce(counts)
        model.bias += 0.05 * (counts.mean() - counts).sign().to(model.bias.dtype)
        model.counts = torch.zeros(4)

    optimizer.register_step_post_hook(move_bias)
    return optimizer


def batch(seed):
    tokens = (torch.arange(1284) + seed) % 24
    tokens[4 - seed] += 1  # so there are 320, 322, 321 and 321 for the experts
    return tokens.reshape(6, 214)


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step}
    made |= {"parallel": strategies.DDP(broadcast_buffers=False)}
    return made | {"optimizer": partial(sgd, right=right)}


faulty, right = partial(case, False), partial(case, True)
