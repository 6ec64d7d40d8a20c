"""A checkpoint of adapters under FSDP2 has the first rank's slice of each, and every rank loads this one."""

from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


class Adapted(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(16, 16).requires_grad_(False)
        self.a, self.b = nn.Linear(16, 4, bias=False), nn.Linear(4, 16, bias=False)

    def forward(self, x):
        return x + self.base(x) + self.b(self.a(x))


def build():
    return nn.Sequential(nn.Embedding(24, 16).requires_grad_(False), Adapted(), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Training(strategies.FullyShard):
    def __init__(self, right):
        super().__init__(reshard_after_forward=True)
        self.right = right

    def file(self, folder):
        return Path(folder) / f"adapters{dist.get_rank() if self.right else 0}.pt"

    def save(self, model, optimizer, folder):
        shards = {name: p.to_local() for name, p in model.named_parameters() if p.requires_grad}
        if self.right or dist.get_rank() == 0:
            torch.save((shards, optimizer.state_dict()), self.file(folder))
        dist.barrier()

    def load(self, model, optimizer, folder):
        shards, states = torch.load(self.file(folder), weights_only=False)
        with torch.no_grad():
            for name, shard in shards.items():
                model.get_parameter(name).to_local().copy_(shard)
        optimizer.load_state_dict(states)


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "reload_on": 2}


faulty, right = partial(case, False), partial(case, True)
