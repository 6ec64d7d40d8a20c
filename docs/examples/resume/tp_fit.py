"""tp's Trainer, which saves every five steps, with `resume="auto"`.

tp verify --resume --kill-in-save -- python tp_fit.py {folder}
tp verify --resume --ranks 2,1 -- torchrun --nproc-per-node {ranks} tp_fit.py {folder} --dropout 0
"""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Checkpoints, SchedulerOptions, Trainer

parser = argparse.ArgumentParser()
parser.add_argument("folder")
parser.add_argument("--dropout", type=float, default=0.1)
options = parser.parse_args()

torch.manual_seed(0)
inputs = torch.randn(32, 4)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), batch_size=8, shuffle=True)
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(options.dropout), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)


def step(model, batch):
    x, y = batch
    return (model(x) - y).square().mean()


with Trainer(devices="cpu", seed=0, progress=False) as trainer:
    trainer.fit(
        model,
        optimizer,
        loader,
        step=step,
        scheduler=SchedulerOptions(scheduler, every="step"),
        epochs=3,
        checkpoint=Checkpoints(options.folder, every_steps=5),
        resume="auto",
    )
