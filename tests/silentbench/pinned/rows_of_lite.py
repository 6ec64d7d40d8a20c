"""Lite's ranks shuffle apart where nobody has seeded them alike: some rows come twice, others never."""

try:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
except ImportError:  # its name before
    from lightning_lite import LightningLite as Fabric
    from lightning_lite.plugins.environments import LightningEnvironment

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Loop(Fabric):
    def run(self, model, optimizer):
        return self.setup(model, optimizer)


class Epochs(Strategy):
    """Each batch is an epoch: a rank has the rows of its loader, and accumulates over them."""

    name = "lite"

    def prepare(self, model, make):
        options = {"strategy": "ddp", "plugins": [LightningEnvironment()]}
        self.loop = Loop(accelerator="cpu", devices=dist.get_world_size(), **options)
        return self.loop.run(model, make(model))

    def share(self, batch):
        torch.manual_seed(dist.get_rank())
        loader = self.loop.setup_dataloaders(DataLoader(batch, batch_size=2, shuffle=True))
        return torch.cat(list(loader))

    def backward(self, model, step, parts):
        mean = 0.0
        for part in parts:
            loss = step(model, part) / len(parts)
            self.loop.backward(loss)
            mean += loss.detach()
        return mean

    def plain_name(self, name):
        for wrapper in ("_forward_module", "_original_module"):
            name = "" if name == wrapper else name.replace(f"{wrapper}.", "")
        return super().plain_name(name)


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (16, 6), generator=numbers) for _ in range(2)]
    case = {"build": build, "batches": batches, "step": step, "parallel": Epochs(), "micro": 4}
    return case | {"dtype": torch.float32}  # of what its wrapper returns
