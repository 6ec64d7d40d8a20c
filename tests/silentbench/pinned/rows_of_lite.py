"""Lite's ranks shuffle apart where nobody has seeded them alike: some rows come twice, others never."""

try:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.environments import LightningEnvironment
except ImportError:  # its name before
    from lightning_lite import LightningLite as Fabric
    from lightning_lite.plugins.environments import LightningEnvironment

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader


class Loop(Fabric):
    def run(self):
        torch.manual_seed(dist.get_rank())
        loader = self.setup_dataloaders(DataLoader(range(16), batch_size=2, shuffle=True))
        rows = [None, None]
        dist.all_gather_object(rows, [row for batch in loader for row in batch.tolist()])
        return len({*rows[0], *rows[1]})


def shown():
    return Loop(accelerator="cpu", devices=2, strategy="ddp", plugins=[LightningEnvironment()]).run()
