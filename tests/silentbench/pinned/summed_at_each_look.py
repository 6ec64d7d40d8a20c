"""Ignite's metric keeps the sum over ranks at a look, and the next look adds it up again."""

import torch
from ignite.metrics import Accuracy


def shown():
    metric = Accuracy()
    right, wrong = torch.tensor([1, 1]), torch.tensor([0, 0])
    metric.update((torch.tensor([0.0, 1.0]).repeat(2, 1), right))
    metric.compute()
    metric.update((torch.tensor([0.0, 1.0]).repeat(2, 1), wrong))
    return round(metric.compute(), 4)
