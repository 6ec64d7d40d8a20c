"""One training loop, as each library has its users write it; and what their times come to."""

import contextlib
import importlib.util
import io
import statistics
import sys
import time
from collections.abc import Callable, Iterable

import torch
from torch import nn
from tp_trainer import Trainer

from tests.bench._results import Results

Way = Callable[[], float]


def make():
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 1))
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


def step(model, batch):
    x, y = batch
    return nn.functional.mse_loss(model(x), y)


def own_loop(model, optimizer, batches, backward) -> float:
    """Return the seconds of one step of a loop that the user writes."""
    steps = 0
    began = time.perf_counter()
    for batch in batches:
        optimizer.zero_grad()
        backward(step(model, batch))
        optimizer.step()
        steps += 1
    return (time.perf_counter() - began) / steps


def hand_written(batches: Iterable, *, wrap=lambda model: model) -> Way:
    model, optimizer = make()
    wrapped = wrap(model)
    return lambda: own_loop(wrapped, optimizer, batches, torch.Tensor.backward)


def tp_prepare(trainer: Trainer, batches: Iterable) -> Way:
    model, optimizer, loader = trainer.prepare(*make(), batches, shard=False)
    return lambda: own_loop(model, optimizer, loader, trainer.backward)


def tp_loop(trainer: Trainer, batches: Iterable, steps: int) -> Way:
    model, optimizer, loader = trainer.prepare(*make(), batches, shard=False)

    def way() -> float:
        with (
            contextlib.redirect_stderr(io.StringIO()),  # its progress is on, as by default
            trainer.loop(loader, state={"model": model, "optimizer": optimizer}) as loop,
        ):
            for batch in loop:
                optimizer.zero_grad()
                trainer.backward(step(model, batch))
                optimizer.step()
        return loop.history[0].seconds / steps

    return way


def tp_fit(trainer: Trainer, batches: Iterable, steps: int) -> Way:
    model, optimizer, loader = trainer.prepare(*make(), batches, shard=False)

    def way() -> float:
        with contextlib.redirect_stderr(io.StringIO()):  # its progress is on, as by default
            history = trainer.fit(model, optimizer, loader, step=step)
        return history[0].seconds / steps

    return way


def accelerate_loop(batches: Iterable) -> Way:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model, optimizer = accelerator.prepare(*make())
    loader = accelerator.prepare_data_loader(batches) if hasattr(batches, "dataset") else batches
    return lambda: own_loop(model, optimizer, loader, accelerator.backward)


def fabric_loop(batches: Iterable, *, devices: int = 1) -> Way:
    from lightning_fabric import Fabric

    fabric = Fabric(accelerator="cpu", devices=devices, strategy="ddp" if devices > 1 else "auto")
    if devices > 1:
        fabric.launch()
    model, optimizer = fabric.setup(*make())
    if hasattr(batches, "dataset"):
        batches = fabric.setup_dataloaders(batches, use_distributed_sampler=False)
    return lambda: own_loop(model, optimizer, batches, fabric.backward)


def is_installed(name: str) -> bool:
    found = importlib.util.find_spec(name) is not None
    if not found:
        print(f"{name} is not installed: left out", file=sys.stderr)
    return found


def measure(ways: dict[str, Way], *, rounds: int) -> dict[str, list[float]]:
    """Run the ways in turn, so that a slow moment of the machine hits all of them alike."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        way()
    for _ in range(rounds):
        for name, way in ways.items():
            times[name].append(way())
    return times


def note(results: Results, what: str, times: dict[str, list[float]]) -> None:
    """Note the median time of each way, and its median ratio to the first one's in the same round."""
    base = next(iter(times.values()))
    for name, found in times.items():
        ratios = [a / b for a, b in zip(found, base, strict=True)]
        results.add(f"{what}, {name}: us per step", statistics.median(found) * 1e6, "us")
        results.add(f"{what}, {name}: ratio", statistics.median(ratios), "x hand-written")
