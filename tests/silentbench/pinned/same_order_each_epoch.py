"""Accelerate's seeded sampler draws the order of the first epoch again in the second."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def shown():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True)
    loader = accelerator.prepare(DataLoader(list(range(16)), batch_size=4, shuffle=True))
    epochs = [[int(row) for batch in loader for row in batch] for _ in range(2)]
    return "the same order" if epochs[0] == epochs[1] else "another order"
