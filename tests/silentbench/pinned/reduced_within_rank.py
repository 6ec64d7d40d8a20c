"""Accelerate's ``reduce``, on CPU ranks or on one device, takes a tensor's own places together."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from torch import nn
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Reduced(Strategy):
    """A loop that averages the ranks' gradients by Accelerate, with no wrapper of the model."""

    name = "accelerate"

    def prepare(self, model, make):
        self.accelerator = Accelerator(cpu=True)
        return model, self.accelerator.prepare(make(model))

    def backward(self, model, step, parts):
        loss = step(model, parts[0])
        self.accelerator.backward(loss)
        for parameter in model.parameters():
            parameter.grad[:] = self.accelerator.reduce(parameter.grad, reduction="mean")
        return loss.detach()


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step, "parallel": Reduced()}
    return [case, case | {"ranks": 1}]
