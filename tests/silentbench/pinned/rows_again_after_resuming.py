"""Accelerate reads a batch ahead, and saves a state from before it: rows come again after resuming."""

import tempfile

import torch
import torch.nn.functional as F
from accelerate import DataLoaderConfiguration
from accelerate.utils import broadcast_object_list
from torch import nn
from torch.utils.data import DataLoader
from tp_verify import strategies

ROWS = torch.randint(24, (32, 6), generator=torch.Generator().manual_seed(0))


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def options():
    return {"dataloader_config": DataLoaderConfiguration(use_stateful_dataloader=True)}


class Resumed(strategies.Accelerate):
    """Ends after two of four batches, and is resumed from a checkpoint that has the loader's state."""

    def prepare(self, model, make):
        prepared = super().prepare(model, make)
        self.loader = self._accelerator.prepare(DataLoader(ROWS, batch_size=4))
        self.batches = self.all_batches()
        return prepared

    def all_batches(self):
        with tempfile.TemporaryDirectory() as own:
            (folder,) = broadcast_object_list([own])
            for number, batch in enumerate(self.loader, 1):
                yield batch
                if number == 2:
                    self._accelerator.save_state(folder)
                    break
            self._accelerator.wait_for_everyone()
            self._accelerator.load_state(folder)
            self._accelerator.wait_for_everyone()
        yield from self.loader

    def backward(self, model, step, parts):
        loss = step(model, next(self.batches))
        self._accelerator.backward(loss)
        return loss.detach()


def cases():
    case = {"build": build, "batches": [*ROWS.split(8)], "step": step}
    return case | {"parallel": Resumed(options), "vary": False}
