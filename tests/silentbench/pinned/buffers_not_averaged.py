"""An average of a model looks for buffers among the parameters, and finds none: they stay as at first."""

import torch
from ema_pytorch import EMA


def shown():
    model = torch.nn.BatchNorm1d(1, momentum=1.0)
    average = EMA(model, beta=0.5, update_after_step=0, update_every=1)
    for _ in range(4):
        model(torch.tensor([[3.0], [5.0]]))
        average.update()
    return round(float(average.ema_model.running_mean), 3)
