from pathlib import Path

import pytorch_lightning as pl
from job import BATCH, EPOCHS, loaders, make, report
from pytorch_lightning.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader
from torchmetrics.classification import BinaryAUROC, BinaryF1Score


class Classifier(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.model, self.optimizer, self.warmup = make()
        self.f1, self.auroc = BinaryF1Score(), BinaryAUROC()

    def training_step(self, batch, batch_idx):
        first = (batch_idx - batch_idx % 2) * BATCH
        rows = min(first + 2 * BATCH, len(train_loader.dataset)) - first  # of this optimizer step
        return self.model(**batch).loss * 2 * len(batch["labels"]) / rows

    def validation_step(self, batch):
        output = self.model(**batch)
        scores = output.logits.softmax(1)[:, 1]
        self.f1.update(scores, batch["labels"])
        self.auroc.update(scores, batch["labels"])
        self.log_dict({"val_f1": self.f1, "val_auroc": self.auroc})
        self.log("val_loss", output.loss, batch_size=len(scores), sync_dist=True)

    def configure_optimizers(self):
        schedule = {"scheduler": self.warmup, "interval": "step"}
        return {"optimizer": self.optimizer, "lr_scheduler": schedule}


train_loader, val_loader = loaders()
train_loader = StatefulDataLoader(train_loader.dataset, BATCH)
trainer = pl.Trainer(
    max_epochs=EPOCHS,
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    callbacks=[
        ModelCheckpoint("run", every_n_train_steps=2, save_last=True),
        ModelCheckpoint("run", "best", monitor="val_f1", mode="max"),
    ],
)
classifier = Classifier()
last = Path("run/last.ckpt")
trainer.fit(classifier, train_loader, val_loader, ckpt_path=last if last.exists() else None)
if trainer.is_global_zero:
    report(classifier.model, trainer.callback_metrics)
