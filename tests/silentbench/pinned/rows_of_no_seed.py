"""Without a global seed, Lightning's ranks shuffle apart: some rows come twice in an epoch, others never."""

import pytorch_lightning as pl
import torch
import torch.distributed as dist
import torch.nn.functional as F
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch import nn
from torch.utils.data import DataLoader
from tp_verify import Strategy


def build():
    return nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))


def step(model, batch):
    return F.cross_entropy(model(batch).flatten(0, 1), (5 * batch + 1).flatten() % 24)


class Module(pl.LightningModule):
    def __init__(self, model, step, optimizer):
        super().__init__()
        self.model, self.step, self.optimizer = model, step, optimizer

    def training_step(self, batch, number):
        loss = self.step(self.model, batch)
        self.log("loss", loss, on_epoch=True, sync_dist=True, batch_size=len(batch))
        return loss

    def configure_optimizers(self):
        return self.optimizer


class Fitted(Strategy):
    """Each step is an epoch of a `fit`, which shuffles a whole batch's rows, and accumulates over them."""

    name, data = "Trainer", "whole"
    reorders = True

    def prepare(self, model, make):
        self.optimizer = make(model)
        return model, self.optimizer

    def backward(self, model, step, parts):
        torch.manual_seed(dist.get_rank())  # as ranks are that nobody seeds
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        quiet |= {"enable_checkpointing": False, "plugins": [LightningEnvironment()], "max_epochs": 1}
        own = {"strategy": "ddp", "accumulate_grad_batches": 4}
        trainer = pl.Trainer(accelerator="cpu", devices=2, **quiet, **own)
        loader = DataLoader(parts[0], batch_size=2, shuffle=True)
        trainer.fit(Module(model, step, self.optimizer), loader)
        return trainer.callback_metrics["loss"]

    def update(self, model, optimizer):
        """Leave the step to the Trainer, which has made it."""


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (16, 6), generator=numbers) for _ in range(2)]
    return {"build": build, "batches": batches, "step": step, "parallel": Fitted()}
