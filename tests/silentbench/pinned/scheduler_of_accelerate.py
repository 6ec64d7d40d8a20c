"""Accelerate's scheduler makes a step for each rank at each optimizer step; its length counts the latter."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def decaying(optimizer):
    return LambdaLR(optimizer, lambda number: max(0.1, 1 - number / 120))


def scheduled(model):
    """Return the optimizer of one device, whose rate a scheduler lowers after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if not torch.distributed.is_initialized():
        scheduler = decaying(optimizer)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


class Scheduled(strategies.Accelerate):
    def prepare(self, model, make):
        model, optimizer = super().prepare(model, make)
        self.scheduler = self._accelerator.prepare(decaying(optimizer.optimizer))
        return model, optimizer

    def update(self, model, optimizer):
        optimizer.step()
        self.scheduler.step()
        optimizer.zero_grad()


def of_one_step():
    from accelerate import DataLoaderConfiguration

    return {"dataloader_config": DataLoaderConfiguration(split_batches=True)}


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step, "optimizer": scheduled}
    return [case | {"parallel": Scheduled(options)} for options in (None, of_one_step)]
