"""Ranks shuffle by seeds of their own: some rows are seen twice in an epoch, and others never."""

import torch
import torch.nn.functional as F
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Epochs(strategies.Accelerate):
    """Each batch is an epoch: a rank has the rows of its loader, and accumulates over them."""

    def share(self, batch):
        set_seed(0, device_specific=True)
        loader = self._accelerator.prepare(DataLoader(batch, batch_size=2, shuffle=True))
        return torch.cat(list(loader))


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (16, 6), generator=numbers) for _ in range(2)]
    return {"build": build, "batches": batches, "step": step, "micro": 4, "parallel": Epochs()}
