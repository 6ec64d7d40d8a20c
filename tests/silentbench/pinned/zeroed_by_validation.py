"""A Lightning validation amid an accumulation sets the gradients to zero that are there by then."""

import pytorch_lightning as pl
import torch
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.layer.weight)

    def training_step(self, batch, number):
        return self.layer(batch).mean()

    def validation_step(self, batch, number):
        return self.layer(batch).mean()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def trainer(**options):
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "plugins": [LightningEnvironment()], "max_epochs": 1}
    return pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", **quiet, **options)


def shown():
    fit = trainer(accumulate_grad_batches=4, val_check_interval=2, num_sanity_val_steps=0)
    model = Model()
    fit.fit(model, DataLoader(torch.ones(8, 1), batch_size=1), DataLoader(torch.ones(2, 1)))
    return round(float(model.layer.weight), 4)
