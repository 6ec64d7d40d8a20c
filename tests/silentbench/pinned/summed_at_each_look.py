"""Ignite's metric keeps the sum over ranks at a look, and the next look adds it up again."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tp_verify import strategies


class PlainAccuracy:
    """The share of all that it has seen that was right."""

    def __init__(self):
        self.seen = []

    def update(self, pair):
        scores, labels = pair
        self.seen.append(scores.argmax(-1) == labels)

    def compute(self):
        return torch.cat(self.seen).double().mean()


def build():
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3))


def step(model, batch):
    scores = model(batch["x"])
    if hasattr(model, "note"):  # it has an optimizer
        model.note((scores.detach(), batch["labels"]))
    return F.cross_entropy(scores, batch["labels"])


def optimizer(model):
    """Return SGD, whose rate is halved after each step that does not raise the accuracy so far."""
    if dist.is_initialized():
        from ignite.metrics import Accuracy

        accuracy = Accuracy()
    else:
        accuracy = PlainAccuracy()
    model.note = accuracy.update
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = ReduceLROnPlateau(sgd, mode="max", factor=0.5, patience=0)
    sgd.register_step_post_hook(lambda *_: scheduler.step(float(accuracy.compute())))
    return sgd


def batch(numbers):
    x = torch.randn(12, 4, generator=numbers)
    return {"x": x, "labels": x[:, :3].argmax(-1)}


def cases():
    numbers = torch.Generator().manual_seed(4)
    case = {"build": build, "batches": [batch(numbers) for _ in range(5)], "step": step}
    return case | {"optimizer": optimizer, "parallel": strategies.DDP()}
