"""In a run of bfloat16, Lightning sums what is logged in bfloat16: the mean of an epoch stops to grow."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch, number):
        loss = self.layer(batch).mean()
        one = torch.ones((), dtype=torch.bfloat16)
        self.log("one", one, on_step=False, on_epoch=True, sync_dist=True, batch_size=1)
        return loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "plugins": [LightningEnvironment()], "max_epochs": 1}
    return pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", **quiet, **options)


def shown():
    torch.set_default_dtype(torch.bfloat16)
    fit = trainer()
    fit.fit(Model(), DataLoader(torch.ones(2000, 1), batch_size=1))
    return round(float(fit.callback_metrics["one"]), 3)
