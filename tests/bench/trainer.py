"""Time per step of the trainer against a hand-written loop and the peers that are installed."""

import importlib.util
import statistics
import sys
import time

import torch
from rich.console import Console
from rich.table import Table
from torch import nn
from tp_trainer import Trainer

STEPS, ROUNDS = 300, 25
torch.set_num_threads(1)
torch.manual_seed(0)
BATCHES = [(torch.randn(8, 16), torch.randn(8, 1)) for _ in range(STEPS)]


def make():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def step(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def own_loop(model, optimizer, batches, backward):
    began = time.perf_counter()
    for batch in batches:
        optimizer.zero_grad()
        backward(step(model, batch))
        optimizer.step()
    return (time.perf_counter() - began) / STEPS


def hand_written():
    return own_loop(*make(), BATCHES, torch.Tensor.backward)


TRAINER = Trainer(devices="cpu", progress=False)


def tp_prepare():
    model, optimizer = TRAINER.prepare(*make())
    return own_loop(model, optimizer, BATCHES, TRAINER.backward)


def tp_fit():
    model, optimizer = make()
    history = TRAINER.fit(model, optimizer, BATCHES, step=step)
    return history[0].seconds / STEPS


def accelerate_loop():
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make())
    return own_loop(model, optimizer, BATCHES, accelerator.backward)


def fabric_loop():
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=1)
    model, optimizer = fabric.setup(*make())
    return own_loop(model, optimizer, BATCHES, fabric.backward)


def main():
    ways = {"hand-written": hand_written, "tp prepare": tp_prepare, "tp fit": tp_fit}
    for name, function in (("accelerate", accelerate_loop), ("lightning_fabric", fabric_loop)):
        if importlib.util.find_spec(name):
            ways[name] = function
        else:
            print(f"{name} is not installed: left out", file=sys.stderr)
    times = {name: [] for name in ways}
    for _ in range(ROUNDS):  # interleaved, so that a slow moment of the machine hits all alike
        for name, way in ways.items():
            times[name].append(way())
    table = Table("way", "us per step", "x hand-written", title="MLP 16-16-1, batch 8, SGD, one process")
    for name, found in times.items():
        ratios = [a / b for a, b in zip(found, times["hand-written"], strict=True)]
        table.add_row(name, f"{statistics.median(found) * 1e6:.1f}", f"{statistics.median(ratios):.3f}")
    Console().print(table)


if __name__ == "__main__":
    main()
