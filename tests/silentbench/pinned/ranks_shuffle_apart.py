"""Ranks shuffle by seeds of their own: some rows are seen twice in an epoch, and others never."""

import random

import torch
import torch.distributed as dist
from accelerate import Accelerator
from torch.utils.data import DataLoader


def shown():
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(16)), batch_size=2, shuffle=True))
    own = torch.tensor([int(row) for batch in loader for row in batch])
    seen = [torch.empty_like(own) for _ in range(2)]
    dist.all_gather(seen, own)
    return len(set(torch.cat(seen).tolist()))
