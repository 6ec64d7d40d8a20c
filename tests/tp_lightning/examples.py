"""Examples of Lightning's documents, in small, and what a trainer comes to with them."""

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def pictures(n=40, batch_size=8):
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(n, 1, 6, 6, generator=generator, dtype=torch.float64)
    return DataLoader(TensorDataset(x, (x.mean((1, 2, 3)) > 0.5).long()), batch_size)


def modules(base, data_base):
    """Return the examples' classes on the given base classes."""

    class AutoEncoder(base):
        """Of "Lightning in 15 minutes": a loss that is logged, one optimizer."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.encoder = nn.Sequential(nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)).double()
            self.decoder = nn.Sequential(nn.Linear(3, 8), nn.ReLU(), nn.Linear(8, 36)).double()

        def training_step(self, batch, batch_idx):
            x = batch[0].view(batch[0].size(0), -1)
            loss = nn.functional.mse_loss(self.decoder(self.encoder(x)), x)
            self.log("train_loss", loss, on_step=True, on_epoch=True)
            return loss

        def test_step(self, batch, batch_idx):
            x = batch[0].view(batch[0].size(0), -1)
            self.log("test_loss", nn.functional.mse_loss(self.decoder(self.encoder(x)), x), on_step=True)

        def predict_step(self, batch, batch_idx):
            return self.encoder(batch[0].view(batch[0].size(0), -1))

        def configure_optimizers(self):
            return torch.optim.Adam(self.parameters(), lr=1e-2)

    class Classifier(base):
        """Of "Optimization" and "Logging": schedulers, hooks, clipping, accumulation, dicts of numbers."""

        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Flatten(), nn.Linear(36, 8), nn.Tanh(), nn.Linear(8, 2)).double()
            self.seen = []

        def forward(self, x):
            return self.net(x)

        def _shared(self, batch):
            x, y = batch
            scores = self(x)
            return nn.functional.cross_entropy(scores, y), (scores.argmax(1) == y).double().mean()

        def training_step(self, batch, batch_idx):
            loss, accuracy = self._shared(batch)
            self.log_dict({"train_loss": loss, "train_acc": accuracy}, on_epoch=True, on_step=False)
            return {"loss": loss, "accuracy": accuracy}

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.seen.append((self.current_epoch, batch_idx, self.global_step))

        def validation_step(self, batch, batch_idx):
            loss, accuracy = self._shared(batch)
            self.log_dict({"val_loss": loss, "val_acc": accuracy})

        def on_validation_epoch_end(self):
            self.log("val_epoch", float(self.current_epoch))

        def on_before_optimizer_step(self, optimizer):
            self.seen.append("step")

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.parameters(), lr=0.5, momentum=0.9)
            steps = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
            plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0)
            return [optimizer], [
                {"scheduler": steps, "interval": "step"},
                {"scheduler": plateau, "monitor": "val_loss"},
            ]

    class Gan(base):
        """Of "Manual optimization": two optimizers, toggled, with a scheduler stepped by hand."""

        def __init__(self):
            super().__init__()
            self.automatic_optimization = False
            torch.manual_seed(0)
            self.generator = nn.Linear(4, 36).double()
            self.discriminator = nn.Linear(36, 1).double()

        def training_step(self, batch, batch_idx):
            opt_g, opt_d = self.optimizers()
            real = batch[0].flatten(1)
            fake = self.generator(real[:, :4])
            loss_d = nn.functional.softplus(-self.discriminator(real)).mean()
            loss_d = loss_d + nn.functional.softplus(self.discriminator(fake.detach())).mean()
            opt_d.zero_grad()
            self.manual_backward(loss_d)
            self.clip_gradients(opt_d, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
            opt_d.step()
            loss_g = nn.functional.softplus(-self.discriminator(fake)).mean()
            opt_g.zero_grad()
            self.manual_backward(loss_g)
            opt_g.step()
            self.log_dict({"g_loss": loss_g, "d_loss": loss_d}, on_epoch=True, on_step=False)

        def on_train_epoch_end(self):
            for scheduler in self.lr_schedulers():
                scheduler.step()

        def configure_optimizers(self):
            pairs = []
            for part in (self.generator, self.discriminator):
                optimizer = torch.optim.Adam(part.parameters(), lr=0.02)
                scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
                pairs.append({"optimizer": optimizer, "lr_scheduler": scheduler})
            return pairs

    class Pictures(data_base):
        def prepare_data(self):
            self.is_there = True

        def setup(self, stage):
            self.train, self.held_back = pictures(36), pictures(20, 8)

        def train_dataloader(self):
            return self.train

        def val_dataloader(self):
            return self.held_back

        def test_dataloader(self):
            return self.held_back

        def predict_dataloader(self):
            return self.held_back

    return AutoEncoder, Classifier, Gan, Pictures


def summary(trainer, module):
    weights = [value for p in module.parameters() for value in p.flatten().tolist()]
    metrics = {name: float(value) for name, value in trainer.callback_metrics.items()}
    return {"weights": weights, "metrics": metrics, "seen": getattr(module, "seen", None)}


def auto_encoder(make_trainer, examples):
    module = examples[0]()
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, pictures(40))
    found = summary(trainer, module)
    found["tested"] = trainer.test(module, pictures(20, 8), verbose=False)[0]
    found["codes"] = [
        value for rows in trainer.predict(module, pictures(10, 4)) for value in rows.flatten().tolist()
    ]
    return found


def classifier(make_trainer, examples):
    module = examples[1]()
    trainer = make_trainer(max_epochs=3, accumulate_grad_batches=2, gradient_clip_val=0.1)
    trainer.fit(module, datamodule=examples[3]())
    return summary(trainer, module)


def gan(make_trainer, examples):
    module = examples[2]()
    trainer = make_trainer(max_epochs=2)
    trainer.fit(module, examples[3]())
    return {**summary(trainer, module), "steps": trainer.global_step}


RUNS = (auto_encoder, classifier, gan)
