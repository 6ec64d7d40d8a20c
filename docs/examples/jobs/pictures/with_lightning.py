from pathlib import Path

import pytorch_lightning as pl
from job import BATCH, EPOCHS, loaders, make, mixed_loss, report
from pytorch_lightning.callbacks import EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.optimizer, self.cycle = make()

    def training_step(self, batch):
        return mixed_loss(self.model, batch)

    def validation_step(self, batch):
        loss = mixed_loss(self.model, batch)
        self.log("val_loss", loss, batch_size=len(batch[0]), sync_dist=True)

    def configure_optimizers(self):
        schedule = {"scheduler": self.cycle, "interval": "step"}
        return {"optimizer": self.optimizer, "lr_scheduler": schedule}


train_loader, val_loader = loaders()
train_loader = StatefulDataLoader(train_loader.dataset, BATCH)
trainer = pl.Trainer(
    max_epochs=EPOCHS,
    callbacks=[
        EMAWeightAveraging(decay=0.5),
        EarlyStopping("val_loss", patience=5),
        ModelCheckpoint("run", every_n_train_steps=3, save_last=True),
        ModelCheckpoint("run", "best", monitor="val_loss"),
    ],
)
classifier = Classifier()
last = Path("run/last.ckpt")
trainer.fit(classifier, train_loader, val_loader, ckpt_path=last if last.exists() else None)
if trainer.is_global_zero:  # the model has the averaged weights now
    report(classifier.model, trainer.current_epoch, trainer.callback_metrics["val_loss"])
