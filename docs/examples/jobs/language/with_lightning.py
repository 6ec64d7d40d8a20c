from pathlib import Path

import pytorch_lightning as pl
from job import BATCH, EPOCHS, loaders, make, report, token_loss
from pytorch_lightning.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader


class Language(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.optimizer = make()

    def training_step(self, batch):
        loss, n_tokens = token_loss(self.model, batch)
        of_all = self.trainer.strategy.reduce(n_tokens, reduce_op="sum")
        return loss * n_tokens * self.trainer.world_size / of_all

    def validation_step(self, batch):
        loss, n_tokens = token_loss(self.model, batch)
        self.log("val_loss", loss, batch_size=int(n_tokens), sync_dist=True)

    def configure_optimizers(self):
        return self.optimizer


language = Language()
train_loader, val_loader = loaders()
train_loader = StatefulDataLoader(train_loader.dataset, BATCH)
trainer = pl.Trainer(
    max_epochs=EPOCHS,
    gradient_clip_val=0.5,
    callbacks=[
        ModelCheckpoint("run", every_n_train_steps=2, save_last=True),
        ModelCheckpoint("run", "best", monitor="val_loss"),
    ],
)
last = Path("run/last.ckpt")
trainer.fit(language, train_loader, val_loader, ckpt_path=last if last.exists() else None)
if trainer.is_global_zero:
    report(language.model, trainer.callback_metrics["val_loss"])
