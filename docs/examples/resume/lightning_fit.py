"""Lightning's Trainer, with `ModelCheckpoint` every five steps and `ckpt_path="last"`.

tp verify --resume -- python lightning_fit.py {folder}
tp verify --resume --ranks 2,1 -- python lightning_fit.py {folder} --devices {ranks} --dropout 0
"""

import argparse

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, EVERY = 3, 8, 5


class Model(lightning.LightningModule):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(dropout), nn.Linear(16, 1))

    def forward(self, x):
        return self.layers(x)

    def training_step(self, batch, number):  # noqa: ARG002 - its signature
        x, y = batch
        return (self(x) - y).square().mean()

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--dropout", type=float, default=0.1)
    parser.add_argument(
        "--stateful", action="store_true", help="torchdata's loader, which keeps its position"
    )
    options = parser.parse_args()

    lightning.seed_everything(0, verbose=False)
    inputs = torch.randn(32, 4)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    make_loader = DataLoader
    if options.stateful:
        from torchdata.stateful_dataloader import StatefulDataLoader

        make_loader = StatefulDataLoader
    loader = make_loader(data, BATCH // options.devices, shuffle=True)
    saves = ModelCheckpoint(options.folder, every_n_train_steps=EVERY, save_last=True, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=options.devices,
        strategy="ddp" if options.devices > 1 else "auto",
        max_epochs=EPOCHS,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Model(options.dropout), loader, ckpt_path="last")


if __name__ == "__main__":
    main()
