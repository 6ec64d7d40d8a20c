"""Accelerate's `save_state` and `load_state`, with `skip_first_batches` within an epoch, as its guide shows.

tp verify --resume -- python accelerate_loop.py {folder}
tp verify --resume -- python accelerate_loop.py {folder} --seedable
tp verify --resume --ranks 2 -- torchrun --nproc-per-node {ranks} accelerate_loop.py {folder} --seedable
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH, EVERY = 3, 8, 5

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--dropout", type=float, default=0.1)
parser.add_argument(
    "--seedable", action="store_true", help="the order of samples follows from seed and epoch"
)
parser.add_argument("--whole", action="store_true", help="rename a save once it is whole")
options = parser.parse_args()

set_seed(0)
loading = DataLoaderConfiguration(use_seedable_sampler=options.seedable, split_batches=True)
accelerator = Accelerator(cpu=True, dataloader_config=loading)
inputs = torch.randn(32, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(options.dropout), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
loader = DataLoader(data, BATCH, shuffle=True)
model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)


def save(step: int) -> None:
    target = options.folder / f"step-{step}"
    if not options.whole:
        accelerator.save_state(target)
        return
    accelerator.save_state(options.folder / "half")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (options.folder / "half").rename(target)
    accelerator.wait_for_everyone()


done = 0
saves = sorted(options.folder.glob("step-*"), key=lambda path: int(path.name.removeprefix("step-")))
if saves:
    accelerator.load_state(saves[-1])
    done = int(saves[-1].name.removeprefix("step-"))

step = done
for epoch in range(done // len(loader), EPOCHS):
    batches = loader
    if step == done and done % len(loader):
        batches = accelerator.skip_first_batches(loader, done % len(loader))
    batches.set_epoch(epoch)
    for x, y in batches:
        optimizer.zero_grad()
        accelerator.backward((model(x) - y).square().mean())
        optimizer.step()
        scheduler.step()
        step += 1
        if step % EVERY == 0:
            save(step)
save(step)
accelerator.end_training()
