"""The learning rate falls with the tokens that are read, and each rank counts its own."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies

ALL = 2000.0  # the tokens of the whole training


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head, self.read = nn.Embedding(24, 16), nn.Linear(16, 24), 0.0

    def forward(self, tokens):
        if self.training:
            self.read += float((tokens != 0).sum())
        return self.head(F.gelu(self.embed(tokens)))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def scheduled(model, right):
    plain = getattr(model, "module", model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3)

    def set_rate(*_):
        read, ranks = torch.tensor(plain.read), 1
        if dist.is_initialized() and right:
            dist.all_reduce(read)
        elif dist.is_initialized():
            ranks = dist.get_world_size()
        optimizer.param_groups[0]["lr"] = 0.3 * max(0.1, 1 - float(read) / (ALL / ranks))

    optimizer.register_step_post_hook(set_rate)
    return optimizer


def batch(seed):
    tokens = torch.randint(1, 24, (8, 6), generator=torch.Generator().manual_seed(seed))
    tokens[5:, 3:] = 0  # short rows are padded
    return tokens


def case(right):
    made = {"build": Model, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": strategies.DDP(), "optimizer": partial(scheduled, right=right)}


faulty, right = partial(case, False), partial(case, True)
