"""AdamG corrects its moments by what they lack, and not by what they have: early steps are off."""

import torch
from pytorch_optimizer import AdamG


def shown():
    weight = torch.nn.Parameter(torch.ones(1))
    optimizer = AdamG([weight], lr=0.1, betas=(0.9, 0.9, 0.9), p=0.5, q=0.25, weight_decay=0.0)
    weight.grad = torch.ones(1)
    optimizer.step()
    return round(float(weight.detach()), 4)
