"""``sync_each_batch`` reduces at each micro-batch, and takes that for the end of the accumulation."""

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def options():
    from accelerate.utils import GradientAccumulationPlugin

    return {"gradient_accumulation_plugin": GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)}


class Accumulated(strategies.Accelerate):
    """The loop of Accelerate's documents; the last of its steps is in `update`."""

    def prepare(self, model, make):
        model, self.optimizer = super().prepare(model, make)
        return model, self.optimizer

    def backward(self, model, step, parts):
        mean = 0.0
        for number, part in enumerate(parts):
            if number:
                self.optimizer.step()
                self.optimizer.zero_grad()
            with self._accelerator.accumulate(model):
                loss = step(model, part)
                self._accelerator.backward(loss)
            mean += loss.detach() / len(parts)
        return mean


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step, "micro": 2}
    return case | {"parallel": Accumulated(options)}
