"""A loader that skips batches counts epochs from 0 again: a resumed run has the first epoch's order."""

import tempfile

import torch
import torch.nn.functional as F
from accelerate import DataLoaderConfiguration
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader
from tp_verify import strategies

EPOCHS = 2
ROWS = torch.randint(24, (32, 6), generator=torch.Generator().manual_seed(0))


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def options():
    return {"dataloader_config": DataLoaderConfiguration(use_seedable_sampler=True)}


class Resumed(strategies.Accelerate):
    """Ends in the second epoch, after one of its four batches, and is resumed as documented."""

    def prepare(self, model, make):
        prepared = super().prepare(model, make)
        torch.manual_seed(0)
        self.loader = self._accelerator.prepare(DataLoader(ROWS, batch_size=4, shuffle=True))
        self.batches = self.all_batches()
        return prepared

    def all_batches(self):
        yield from self.loader
        self.loader.set_epoch(1)
        yield next(iter(self.loader))
        with tempfile.TemporaryDirectory() as own:
            (folder,) = broadcast_object_list([own])
            self._accelerator.save_state(folder)
            self._accelerator.wait_for_everyone()
            self._accelerator.load_state(folder)
            self._accelerator.wait_for_everyone()
        self.loader.set_epoch(1)
        yield from self._accelerator.skip_first_batches(self.loader, 1)

    def backward(self, model, step, parts):
        loss = step(model, next(self.batches))
        self._accelerator.backward(loss)
        return loss.detach()


def cases():
    batches = []
    for epoch in range(EPOCHS):  # by the seed and the epoch, as the sampler's documents say
        order = torch.randperm(len(ROWS), generator=torch.Generator().manual_seed(epoch))
        batches += [ROWS[numbers] for numbers in order.split(8)]
    return {"build": build, "batches": batches, "step": step, "parallel": Resumed(options), "vary": False}
