"""``split_between_processes`` gives the last row to a rank that has none, where nobody asks for padding."""

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    summed = F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24, reduction="sum")
    count = torch.tensor(batch.numel())
    return {"loss": summed / count.clamp(min=1), "weight": count}


class Split(strategies.Accelerate):
    """Ranks split fewer rows than there are ranks; the loss is the mean over the tokens of all."""

    data = "whole"

    def share(self, batch):
        with self._accelerator.split_between_processes(batch) as rows:
            return rows

    def backward(self, model, step, parts):
        output = step(model, parts[0])
        total = self._accelerator.reduce(output["weight"], "sum")
        loss = output["loss"] * output["weight"] / total
        self._accelerator.backward(loss * self._accelerator.num_processes)  # DDP takes the mean
        return self._accelerator.reduce(loss.detach(), "sum")


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (2, 6), generator=numbers) for _ in range(2)]
    return {"build": build, "batches": batches, "step": step, "parallel": Split(), "ranks": 3}
