"""A loader that is saved at the end of an epoch skips the next one after loading: it is empty."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DistributedSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from tp_verify import strategies

EPOCHS = 3
ROWS = torch.randint(24, (16, 6), generator=torch.Generator().manual_seed(0))


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def made():
    sampler = DistributedSampler(ROWS, shuffle=True)
    return sampler, StatefulDataLoader(ROWS, batch_size=4, sampler=sampler)


class Resumed(strategies.DDP):
    """Ends after the first epoch, and is resumed with the state of its loader."""

    def prepare(self, model, make):
        self.batches = self.all_batches()
        return super().prepare(model, make)

    def all_batches(self):
        sampler, loader = made()
        yield from loader
        saved = loader.state_dict()
        sampler, loader = made()
        loader.load_state_dict(saved)
        for epoch in range(1, EPOCHS):
            sampler.set_epoch(epoch)
            yield from loader

    def share(self, batch):
        return batch[dist.get_rank() :: dist.get_world_size()]  # as the sampler gives them

    def backward(self, model, step, parts):
        return super().backward(model, step, [next(self.batches)])


def cases():
    batches = []
    for epoch in range(EPOCHS - 1):
        sampler = DistributedSampler(ROWS, num_replicas=1, rank=0)
        sampler.set_epoch(epoch)
        batches += ROWS[list(sampler)].split(8)
    return {"build": build, "batches": batches, "step": step, "parallel": Resumed(), "vary": False}
