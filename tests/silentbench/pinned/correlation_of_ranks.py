"""TorchMetrics joins the ranks' variances by a formula for other states: their correlation is another one."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tp_verify import strategies


class PlainCorrelation:
    """The correlation of all that it has seen."""

    def __init__(self):
        self.seen = []

    def update(self, *pair):
        self.seen.append(torch.stack(pair))

    def compute(self):
        return torch.corrcoef(torch.cat(self.seen, dim=1))[0, 1]


def build():
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 1), nn.Flatten(0))


def step(model, batch):
    predicted = model(batch["x"])
    if hasattr(model, "note"):  # it has an optimizer
        model.note(predicted.detach(), batch["y"])
    return F.mse_loss(predicted, batch["y"])


def optimizer(model):
    """Return SGD, whose rate is halved after each step that does not raise the correlation so far."""
    if dist.is_initialized():
        from torchmetrics import PearsonCorrCoef

        correlation = PearsonCorrCoef()
    else:
        correlation = PlainCorrelation()
    model.note = correlation.update
    sgd = torch.optim.SGD(model.parameters(), lr=0.3)
    scheduler = ReduceLROnPlateau(sgd, mode="max", factor=0.5, patience=0)
    sgd.register_step_post_hook(lambda *_: scheduler.step(float(correlation.compute())))
    return sgd


def batch(numbers):
    x = torch.randn(12, 4, generator=numbers)
    return {"x": x, "y": x.sum(1) + torch.randn(12, generator=numbers)}


def cases():
    numbers = torch.Generator().manual_seed(5)
    case = {"build": build, "batches": [batch(numbers) for _ in range(4)], "step": step}
    return case | {"optimizer": optimizer, "parallel": strategies.DDP()}
