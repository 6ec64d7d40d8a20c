"""An average of a model leaves out weights in bfloat16: they stay as at first."""

import torch
from ema_pytorch import EMA


def shown():
    model = torch.nn.Linear(1, 1, bias=False).bfloat16()
    torch.nn.init.zeros_(model.weight)
    average = EMA(model, beta=0.5, update_after_step=0, update_every=1)
    average.update()
    torch.nn.init.ones_(model.weight)
    for _ in range(8):
        average.update()
    return round(float(average.ema_model.weight), 2)
