"""TorchMetrics joins the ranks' variances by a formula for other states: their correlation is another one."""

import torch
import torch.distributed as dist
from torchmetrics import PearsonCorrCoef


def shown():
    numbers = torch.Generator().manual_seed(0)
    x = torch.randn(12, generator=numbers)
    y = x + torch.randn(12, generator=numbers)
    own = slice(6 * dist.get_rank(), 6 * dist.get_rank() + 6)
    metric = PearsonCorrCoef()
    metric.update(x[own], y[own])
    return round(float(metric.compute()), 4)
