"""Accelerate's loader on several ranks ignores the seed: each run has the same order of rows."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def shown():
    accelerator = Accelerator(cpu=True)
    orders = []
    for seed in range(2):
        torch.manual_seed(seed)
        loader = accelerator.prepare(DataLoader(list(range(16)), batch_size=2, shuffle=True))
        orders.append([int(row) for batch in loader for row in batch])
    return "the same order" if orders[0] == orders[1] else "another order"
