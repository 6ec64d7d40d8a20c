"""Loading writes the state into Fabric's wrapper alone: the optimizer in it goes on with its own."""

import torch
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import LightningEnvironment


def stepped(fabric):
    model = torch.nn.Linear(1, 1, bias=False)
    model, optimizer = fabric.setup(model, torch.optim.Adam(model.parameters()))
    fabric.backward(model(torch.ones(1, 1)).sum())
    optimizer.step()
    return optimizer


def shown():
    fabric = Fabric(accelerator="cpu", devices=2, strategy="ddp", plugins=[LightningEnvironment()])
    fabric.launch()
    other = stepped(fabric)
    saved = other.state_dict()
    saved["state"][0]["step"] += 41
    optimizer = stepped(fabric)
    optimizer.load_state_dict(saved)
    return int(optimizer.state_dict()["state"][0]["step"])
