"""Accelerate's scheduler makes a step at each micro-batch, where the optimizer accumulates four."""

import torch
from accelerate import Accelerator
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader


def shown():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4, split_batches=True)
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = LambdaLR(optimizer, lambda number: 1 - number / 10)
    loader = DataLoader(torch.ones(16, 2), batch_size=2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    scheduler = accelerator.prepare_scheduler(scheduler)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return round(scheduler.get_last_lr()[0], 3)
