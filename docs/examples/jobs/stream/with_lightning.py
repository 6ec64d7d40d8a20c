from pathlib import Path

import pytorch_lightning as pl
from job import BATCH, EPOCHS, STEPS, Rows, line_loss, make, report
from pytorch_lightning.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader


class Line(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.optimizer = make()

    def training_step(self, batch):
        return line_loss(self.model, batch)

    def configure_optimizers(self):
        return self.optimizer

    def train_dataloader(self):
        rows = Rows().shard(self.trainer.global_rank, self.trainer.world_size)
        return StatefulDataLoader(rows, BATCH // self.trainer.world_size)


line = Line()
checkpoint = ModelCheckpoint("run", every_n_train_steps=2, save_last=True)
trainer = pl.Trainer(max_epochs=EPOCHS, limit_train_batches=STEPS, callbacks=[checkpoint])
last = Path("run/last.ckpt")
trainer.fit(line, ckpt_path=last if last.exists() else None)
if trainer.is_global_zero:
    report(line.model)
