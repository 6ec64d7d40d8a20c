"""The moving average of the weights moves at each micro-batch, and not at each optimizer step."""

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
        self.register_buffer("average", self.head.weight.detach().clone())

    def forward(self, tokens):
        return self.head(F.gelu(self.embed(tokens)))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def averaging(model, right):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = getattr(model, "module", model)
    times = 2 if dist.is_initialized() and not right else 1  # as many as a step has micro-batches

    def average(*_):
        for _ in range(times):
            plain.average.lerp_(plain.head.weight.detach(), 0.1)

    optimizer.register_step_post_hook(average)
    return optimizer


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step, "micro": 2}
    return made | {"parallel": strategies.DDP(), "optimizer": partial(averaging, right=right)}


faulty, right = partial(case, False), partial(case, True)
