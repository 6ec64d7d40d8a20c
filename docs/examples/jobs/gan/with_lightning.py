from pathlib import Path

import pytorch_lightning as pl
from job import BATCH, EPOCHS, disc_loss, gen_loss, loader, make, report
from pytorch_lightning.callbacks import ModelCheckpoint
from torchdata.stateful_dataloader import StatefulDataLoader


class Gan(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.gen, self.disc, *self.both = make()

    def training_step(self, batch):
        opt_g, opt_d = self.optimizers()
        opt_d.zero_grad()
        loss_d = disc_loss(self.disc, self.gen, batch)
        self.manual_backward(loss_d)
        opt_d.step()
        opt_g.zero_grad()
        loss_g = gen_loss(self.gen, self.disc, batch)
        self.manual_backward(loss_g)
        opt_g.step()
        self.log_dict({"loss_d": loss_d, "loss_g": loss_g}, on_epoch=True, sync_dist=True)

    def configure_optimizers(self):
        return self.both


gan = Gan()
checkpoint = ModelCheckpoint("run", every_n_train_steps=4, save_last=True)  # it counts both optimizers
trainer = pl.Trainer(max_epochs=EPOCHS, callbacks=[checkpoint])
last = Path("run/last.ckpt")
batches = StatefulDataLoader(loader().dataset, BATCH)
trainer.fit(gan, batches, ckpt_path=last if last.exists() else None)
if trainer.is_global_zero:
    report(gan.gen, gan.disc)
