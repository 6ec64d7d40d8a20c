"""A Lightning validation amid an accumulation sets the gradients to zero that are there by then."""

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
        self.model, self.step, self.optimizer = model, step, optimizer

    def training_step(self, batch, number):
        loss = self.step(self.model, batch)
        self.log("loss", loss, on_epoch=True, batch_size=len(batch))
        return loss

    def validation_step(self, batch, number):
        return self.step(self.model, batch)

    def configure_optimizers(self):
        return self.optimizer


class Fitted(Strategy):
    """Each step is a `fit` of the Trainer, which validates after half of this rank's micro-batches."""

    name = "Trainer"

    def prepare(self, model, make):
        self.model, self.optimizer = model, make(model)
        self.optimizer.register_step_post_hook(self.keep_gradients)  # a validation may drop them
        return model, self.optimizer

    def keep_gradients(self, *_):
        self.gradients = {p: p.grad.clone() for p in self.model.parameters()}

    def gradient(self, parameter):
        return self.gradients[parameter]

    def backward(self, model, step, parts):
        quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
        quiet |= {"enable_checkpointing": False, "plugins": [LightningEnvironment()], "max_epochs": 1}
        own = {"use_distributed_sampler": False, "accumulate_grad_batches": len(parts)}
        own |= {"val_check_interval": len(parts) // 2, "num_sanity_val_steps": 0}
        trainer = pl.Trainer(accelerator="cpu", devices=2, strategy="ddp", **quiet, **own)
        loader = DataLoader(parts, batch_size=None)
        trainer.fit(Module(model, step, self.optimizer), loader, loader)
        return trainer.callback_metrics["loss"]

    def update(self, model, optimizer):
        """Leave the step to the Trainer, which has made it."""


def cases():
    numbers = torch.Generator().manual_seed(0)
    batches = [torch.randint(24, (8, 6), generator=numbers) for _ in range(2)]
    return {"build": build, "batches": batches, "step": step, "parallel": Fitted(), "micro": 4}
