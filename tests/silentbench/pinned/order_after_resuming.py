"""A loader that skips batches counts epochs from 0 again: a resumed run has the first epoch's order."""

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from torch.utils.data import DataLoader


def shown():
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
    loader = accelerator.prepare(DataLoader(list(range(16)), batch_size=2, shuffle=True))
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    loader.set_epoch(1)
    resumed = [batch.tolist() for batch in accelerator.skip_first_batches(loader, 2)]
    return [number for number in range(2) if resumed == epochs[number][2:]]
