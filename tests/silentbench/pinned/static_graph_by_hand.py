"""With a static graph of DDP, the first step of Lightning's manual optimization has each rank's gradients."""

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning.plugins.environments import LightningEnvironment
from torch.utils.data import DataLoader


class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.layer = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.layer.weight)

    def training_step(self, batch, number):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.layer(batch).mean())
        optimizer.step()

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def shown():
    from pytorch_lightning.strategies import DDPStrategy

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    quiet |= {"enable_checkpointing": False, "plugins": [LightningEnvironment()], "max_steps": 1}
    fit = pl.Trainer(accelerator="cpu", devices=2, strategy=DDPStrategy(static_graph=True), **quiet)
    model = Model()
    rows = torch.tensor([[1.0], [3.0]])[[dist.get_rank()]]
    fit.fit(model, DataLoader(rows.repeat(4, 1), batch_size=1))
    return round(float(model.layer.weight), 3)
