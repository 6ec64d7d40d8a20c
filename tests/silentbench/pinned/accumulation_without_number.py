"""Where a Lightning step takes no batch number, gradients are set to zero before each micro-batch."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.layer.weight)

    def training_step(self, batch):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "plugins": [LightningEnvironment()], "max_epochs": 1}
    return pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", **quiet, **options)


def shown():
    fit = trainer(accumulate_grad_batches=4)
    model = Model()
    fit.fit(model, DataLoader(torch.ones(16, 1), batch_size=1))
    return round(float(model.layer.weight), 4)
