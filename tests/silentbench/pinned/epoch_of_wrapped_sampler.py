"""Fabric tells the epoch to its wrapper, not to the sampler in it: each epoch has the first one's order."""

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader, Sampler


class Order(Sampler):
    epoch = 0

    def __len__(self):
        return 8

    def __iter__(self):
        numbers = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(8, generator=numbers).tolist())

    def set_epoch(self, epoch):
        self.epoch = epoch


def shown():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=[LightningEnvironment()])
    fabric.launch()
    loader = fabric.setup_dataloaders(DataLoader(range(8), batch_size=2, sampler=Order()))
    epochs = [[batch.tolist() for batch in loader] for _ in range(2)]
    return "the same order" if epochs[0] == epochs[1] else "another order"
