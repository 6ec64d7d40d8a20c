"""Lookahead saves no slow weights: what is loaded goes on from the weights at that time."""

import torch
from pytorch_optimizer import Lookahead


def made(weight):
    return Lookahead(torch.optim.SGD([weight], lr=1.0), k=4, alpha=0.5)


def stepped(weight, optimizer, steps):
    for _ in range(steps):
        weight.grad = torch.ones(1)
        optimizer.step()


def shown():
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = made(weight)
    stepped(weight, optimizer, 3)
    resumed = made(weight)
    resumed.load_state_dict(optimizer.state_dict())
    stepped(weight, resumed, 4)
    return round(float(weight.detach()), 3)
