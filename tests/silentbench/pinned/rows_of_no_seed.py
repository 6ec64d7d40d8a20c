"""Without a global seed, Lightning's ranks shuffle apart: some rows come twice in an epoch, others never."""

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)
        self.rows = []

    def training_step(self, batch, number):
        self.rows += batch.flatten().tolist()
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "plugins": [LightningEnvironment()], "max_epochs": 1}
    return pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", **quiet, **options)


def shown():
    torch.manual_seed(dist.get_rank())
    model = Model()
    trainer().fit(model, DataLoader(torch.arange(16.0)[:, None], batch_size=2, shuffle=True))
    seen = [None, None]
    dist.all_gather_object(seen, model.rows)
    return len({*seen[0], *seen[1]})
