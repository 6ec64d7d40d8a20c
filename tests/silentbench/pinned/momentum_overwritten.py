"""Lion's update is its momentum, by another name: the decay of the one is applied to the other."""

import torch
from pytorch_optimizer import Lion


def shown():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = Lion([weight], lr=0.1, betas=(0.5, 0.9), weight_decay=0.0)
    for gradient in (1.0, 1.0, -0.8):
        weight.grad = torch.tensor([gradient])
        optimizer.step()
    return round(float(optimizer.state[weight]["exp_avg"]), 4)
