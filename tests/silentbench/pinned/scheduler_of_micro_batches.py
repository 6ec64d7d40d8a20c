"""Accelerate's scheduler makes a step at each micro-batch, where the optimizer accumulates four."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def decaying(optimizer):
    return LambdaLR(optimizer, lambda number: max(0.1, 1 - number / 120))


def scheduled(model):
    """Return the optimizer of one device, whose rate a scheduler lowers after each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if not dist.is_initialized():
        scheduler = decaying(optimizer)
        optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


class Accumulated(Strategy):
    """The loop of Accelerate's documents; the last of its steps is in `update`."""

    name = "accelerate"

    def prepare(self, model, make):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, split_batches=True)
        model, self.optimizer = self.accelerator.prepare(model, make(model))
        self.scheduler = self.accelerator.prepare_scheduler(decaying(self.optimizer.optimizer))
        return model, self.optimizer

    def backward(self, model, step, parts):
        mean = 0.0
        for number, part in enumerate(parts):
            if number:
                self.update(model, self.optimizer)
            with self.accelerator.accumulate(model):
                loss = step(model, part)
                self.accelerator.backward(loss)
            mean += loss.detach() / len(parts)
        return mean

    def update(self, model, optimizer):
        optimizer.step()
        self.scheduler.step()
        optimizer.zero_grad()


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step, "optimizer": scheduled, "micro": 4}
    return case | {"parallel": Accumulated()}
