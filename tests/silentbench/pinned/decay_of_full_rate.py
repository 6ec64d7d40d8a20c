"""Ranger21 decays weights by the rate that was asked for, and not by that of its warm-up."""

import torch
from pytorch_optimizer import Ranger21


def shown():
    weight = torch.nn.Parameter(torch.ones(2, 2))
    optimizer = Ranger21([weight], num_iterations=100, num_warm_up_iterations=50, lr=0.1, weight_decay=0.5)
    for _ in range(2):
        weight.grad = torch.zeros(2, 2)
        optimizer.step()
    return round(float(weight.detach()[0, 0]), 4)
