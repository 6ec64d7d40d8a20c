"""Gradients of a float32 model are rounded to bfloat16 before ranks sum them."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def compressed(state, bucket):
    """Sum a bucket of gradients in bfloat16."""
    gradients = bucket.buffer()
    short = gradients.bfloat16() / dist.get_world_size()
    reduced = dist.all_reduce(short, async_op=True).get_future()
    return reduced.then(lambda done: gradients.copy_(done.value()[0]))


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def parallelize(self, model):
        wrapped = DistributedDataParallel(model)
        if not self.right:
            wrapped.register_comm_hook(None, compressed)
        return wrapped


def batch(seed):
    return torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(seed))


def case(right):
    made = {"build": build, "batches": [batch(0), batch(1)], "step": step}
    return made | {"parallel": Training(right), "dtype": torch.float32}


faulty, right = partial(case, False), partial(case, True)
