"""Accelerate reads a batch ahead, and saves a state from before it: rows come again after resuming."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader


def loader():
    torch.manual_seed(0)
    accelerator = Accelerator(
        cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True)
    )
    return accelerator.prepare(DataLoader(list(range(24)), batch_size=2))


def shown():
    first, rows = loader(), []
    for number, batch in enumerate(first):
        rows += batch.tolist()
        if number == 2:
            state = first.state_dict()
            break
    resumed = loader()
    resumed.load_state_dict(state)
    rows += [row for batch in resumed for row in batch.tolist()]
    return len(rows) - len(set(rows))
