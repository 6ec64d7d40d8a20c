"""A loop of torch alone, on one rank or more. It saves every five steps, and continues from the newest save.

tp verify --resume --kill-in-save -- python torch_loop.py {folder}
tp verify --resume --ranks 2 -- torchrun --nproc-per-node {ranks} torch_loop.py {folder}
tp verify --resume --ranks 2,1 -- torchrun --nproc-per-node {ranks} torch_loop.py {folder} --dropout 0
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

EPOCHS, BATCH, EVERY = 3, 8, 5

parser = argparse.ArgumentParser()
parser.add_argument("folder", type=Path)
parser.add_argument("--dropout", type=float, default=0.1)
options = parser.parse_args()
rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))

torch.manual_seed(0)
inputs = torch.randn(32, 4)
data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
sampler = DistributedSampler(data, ranks, rank, seed=0)
# With a generator of its own: an epoch that is skipped draws nothing from torch's.
loader = DataLoader(data, BATCH // ranks, sampler=sampler, generator=torch.Generator())
plain = model = nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Dropout(options.dropout), nn.Linear(16, 1))
if ranks > 1:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(plain)
optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=10)
torch.manual_seed(1 + rank)  # each rank drops other rows


def save(step: int) -> None:
    random = [torch.get_rng_state()]
    if ranks > 1:
        random = [None] * ranks
        dist.all_gather_object(random, torch.get_rng_state())
    if rank == 0:
        states = {"model": plain, "optimizer": optimizer, "scheduler": scheduler}
        saved = {name: one.state_dict() for name, one in states.items()}
        torch.save({"step": step, "random": random, **saved}, options.folder / "half.pt")
        (options.folder / "half.pt").replace(options.folder / "last.pt")


done, random = 0, None
if (options.folder / "last.pt").exists():
    saved = torch.load(options.folder / "last.pt")
    plain.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    done = saved["step"]
    if len(saved["random"]) == ranks:
        random = saved["random"][rank]

step = 0
for epoch in range(EPOCHS):
    sampler.set_epoch(epoch)
    for x, y in loader:
        step += 1
        if step <= done:
            continue
        if random is not None:
            torch.set_rng_state(random)
            random = None
        optimizer.zero_grad()
        (model(x) - y).square().mean().backward()
        optimizer.step()
        scheduler.step()
        if step % EVERY == 0:
            save(step)
save(step)
if ranks > 1:
    dist.destroy_process_group()
