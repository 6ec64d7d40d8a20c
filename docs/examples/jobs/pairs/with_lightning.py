from pathlib import Path

import pytorch_lightning as pl
from job import BATCH, EPOCHS, info_nce, loader, make, report
from pytorch_lightning.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader


class Pairs(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.optimizer = make()

    def training_step(self, batch):
        a, b, scale = self.model(*batch)
        a, b = (self.all_gather(rows, sync_grads=True).reshape(-1, rows.shape[1]) for rows in (a, b))
        return info_nce(a, b, scale)

    def configure_optimizers(self):
        return self.optimizer


pairs = Pairs()
checkpoint = ModelCheckpoint("run", every_n_train_steps=2, save_last=True)
trainer = pl.Trainer(max_epochs=EPOCHS, callbacks=[checkpoint])
last = Path("run/last.ckpt")
batches = StatefulDataLoader(loader().dataset, BATCH)
trainer.fit(pairs, batches, ckpt_path=last if last.exists() else None)
if trainer.is_global_zero:
    report(pairs.model)
