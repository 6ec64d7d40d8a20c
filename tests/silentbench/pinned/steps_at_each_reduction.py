"""``sync_each_batch`` reduces at each micro-batch, and takes that for the end of the accumulation."""

import torch
from accelerate import Accelerator
from accelerate.utils import GradientAccumulationPlugin


def shown():
    plugin = GradientAccumulationPlugin(num_steps=2, sync_each_batch=True)
    accelerator = Accelerator(cpu=True, gradient_accumulation_plugin=plugin)
    model = torch.nn.Linear(1, 1, bias=False)
    torch.nn.init.ones_(model.weight)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(4):
        with accelerator.accumulate(model):
            accelerator.backward(model(torch.ones(1, 1)).mean())
            optimizer.step()
            optimizer.zero_grad()
    return round(float(next(model.parameters())), 3)
