"""All ranks have one seed, so that rows of other ranks get the noise of the first rank's rows."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from tp_verify import strategies


def build():
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 6))


def step(model, batch):
    return F.mse_loss(model(batch["x"] + batch["noise"]), batch["x"])


class Training(strategies.DDP):
    def __init__(self, right):
        super().__init__()
        self.right = right

    def share(self, batch):
        mine = super().share(batch)
        if not self.right:
            mine["noise"] = batch["noise"][: len(mine["x"])]
        return mine


def batch(seed):
    numbers = torch.Generator().manual_seed(seed)
    return {"x": torch.randn(8, 6, generator=numbers), "noise": torch.randn(8, 6, generator=numbers)}


def case(right):
    return {"build": build, "batches": [batch(0), batch(1)], "step": step, "parallel": Training(right)}


faulty, right = partial(case, False), partial(case, True)
