"""Loading writes the state into Fabric's wrapper alone: the optimizer in it goes on with its own."""

from copy import deepcopy
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning_fabric import Fabric
from lightning_fabric.plugins.environments import LightningEnvironment
from torch import nn
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


def adam(model):
    return torch.optim.Adam(model.parameters(), lr=1e-2)


def resumed(state, model):
    optimizer = adam(model)
    optimizer.load_state_dict(deepcopy(state))
    return optimizer


class Resumed(Strategy):
    """Goes on from the optimizer's state of a checkpoint."""

    name = "fabric"

    def __init__(self, state):
        super().__init__()
        self.state = state

    def prepare(self, model, make):
        options = {"strategy": "ddp", "plugins": [LightningEnvironment()]}
        self.fabric = Fabric(accelerator="cpu", devices=dist.get_world_size(), **options)
        self.fabric.launch()
        model, optimizer = self.fabric.setup(model, adam(model))
        optimizer.load_state_dict(deepcopy(self.state))
        return model, optimizer

    def plain_name(self, name):
        for wrapper in ("_forward_module", "_original_module"):
            name = "" if name == wrapper else name.replace(f"{wrapper}.", "")
        return super().plain_name(name)


def cases():
    batches = [torch.randint(24, (8, 6), generator=torch.Generator().manual_seed(n)) for n in range(3)]
    model = build()
    optimizer = adam(model)
    step(model, batches[0]).backward()
    optimizer.step()
    state = optimizer.state_dict()
    case = {"build": build, "batches": batches[1:], "step": step, "optimizer": partial(resumed, state)}
    return case | {"parallel": Resumed(state)}
