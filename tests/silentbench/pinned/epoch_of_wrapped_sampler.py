"""Fabric tells the epoch to its wrapper, not to the sampler in it: each epoch has the first one's order."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader, Sampler
from tp_verify import Strategy

EPOCHS = 2
ROWS = torch.randint(24, (16, 6), generator=torch.Generator().manual_seed(0))


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Order(Sampler):
    epoch = 0

    def __len__(self):
        return len(ROWS)

    def __iter__(self):
        numbers = torch.Generator().manual_seed(self.epoch)
        return iter(torch.randperm(len(ROWS), generator=numbers).tolist())

    def set_epoch(self, epoch):
        self.epoch = epoch


class Looped(Strategy):
    """Trains on what Fabric's loader gives, epoch after epoch."""

    name = "fabric"

    def prepare(self, model, make):
        options = {"strategy": "ddp", "plugins": [LightningEnvironment()]}
        self.fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), **options)
        self.fabric.launch()
        loader = self.fabric.setup_dataloaders(DataLoader(ROWS, batch_size=4, sampler=Order()))
        self.batches = (batch for _ in range(EPOCHS) for batch in loader)
        return self.fabric.setup(model, make(model))

    def share(self, batch):
        return batch[dist.get_rank() :: dist.get_world_size()]  # as distributed samplers give them

    def backward(self, model, step, parts):
        loss = step(model, next(self.batches))
        self.fabric.backward(loss)
        return loss.detach()

    def plain_name(self, name):
        for wrapper in ("_forward_module", "_original_module"):
            name = "" if name == wrapper else name.replace(f"{wrapper}.", "")
        return super().plain_name(name)


def cases():
    order, batches = Order(), []
    for epoch in range(EPOCHS):
        order.set_epoch(epoch)
        batches += ROWS[list(order)].split(8)
    return {"build": build, "batches": batches, "step": step, "parallel": Looped(), "vary": False}
