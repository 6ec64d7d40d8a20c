"""A worker's seed has Lightning's in its upper bits, which torch leaves out: all runs draw the same."""

import os

import torch
from lightning_fabric.utilities.seed import pl_worker_init_function


def shown():
    drawn = set()
    for seed in range(8):
        torch.manual_seed(seed)
        pl_worker_init_function(0, rank=int(os.environ["RANK"]))
        drawn.add(float(torch.rand(())))
    return len(drawn)
