"""With a static graph of DDP, the first step of Lightning's manual optimization has each rank's gradients."""

import pytorch_lightning as pl
import torch
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
        self.automatic_optimization = False
        self.model, self.step, self.optimizer = model, step, optimizer

    def training_step(self, batch, number):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.step(self.model, batch)
        self.manual_backward(loss)
        optimizer.step()
        self.log("loss", loss, on_epoch=True, batch_size=len(batch))

    def configure_optimizers(self):
        return self.optimizer


class Fitted(Strategy):
    """Each step is a `fit` of the Trainer, on this rank's rows."""

    name = "Trainer"

    def prepare(self, model, make):
        self.optimizer = make(model)
        return model, self.optimizer

    def backward(self, model, step, parts):
        from pytorch_lightning.strategies import DDPStrategy

        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        quiet |= {"enable_checkpointing": False, "plugins": [LightningEnvironment()], "max_epochs": 1}
        quiet |= {"use_distributed_sampler": False, "strategy": DDPStrategy(static_graph=True)}
        trainer = pl.Trainer(accelerator="cpu", devices=2, **quiet)
        trainer.fit(Module(model, step, self.optimizer), DataLoader(parts, batch_size=None))
        return trainer.callback_metrics["loss"]

    def update(self, model, optimizer):
        """Leave the step to the training step, which has made it."""


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    return {"build": build, "batches": batches, "step": step, "parallel": Fitted()}
