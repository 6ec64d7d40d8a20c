"""A contrastive loss over features of all ranks, each with gradients of its own, which DDP then averages."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def gathered(features, right):
    """Return the features of all ranks, of which those of this one have a gradient."""
    if not dist.is_initialized():
        return features
    parts = [torch.empty_like(features) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, features.detach())
    if right and features.requires_grad:
        features = features.clone()
        features.register_hook(lambda gradient: gradient * dist.get_world_size())
    parts[dist.get_rank()] = features
    return torch.cat(parts)


def step(model, batch, right):
    one = gathered(F.normalize(model(batch["one"]), dim=-1), right)
    other = gathered(F.normalize(model(batch["other"]), dim=-1), right)
    return F.cross_entropy(one @ other.T / 0.2, torch.arange(len(one)))


def batch(seed):
    one = torch.randn(8, 8, generator=torch.Generator().manual_seed(seed))
    return {"one": one, "other": one + 0.5 * one.roll(1, dims=1)}


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.2)


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": partial(step, right=right)}
    return made | {"parallel": strategies.DDP(), "optimizer": sgd}


faulty, right = partial(case, False), partial(case, True)
