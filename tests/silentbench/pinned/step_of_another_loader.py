"""A loader that ends inside of another's loop ends the other's accumulation, too: weights step too early."""

import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader


def shown():
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    rows = torch.ones(16, 1)
    model, optimizer, loader, other = accelerator.prepare(
        model, optimizer, DataLoader(rows, batch_size=1), DataLoader(rows, batch_size=8)
    )
    steps = []
    for number, batch in enumerate(loader):
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            optimizer.step()
            steps.append(int(accelerator.sync_gradients))
            optimizer.zero_grad()
        if number == 1:
            for _ in other:
                pass
    return steps
