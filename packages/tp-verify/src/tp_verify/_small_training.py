"""A small training, which ``tp verify`` compares on all backends; and the same by hand, on one device."""

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from tp_core.random import preserve_rng_state, seed_torch

SAMPLES = 22
BATCH = 4  # the last batch of an epoch is smaller
EPOCHS = 2
STEPS = EPOCHS * math.ceil(SAMPLES / BATCH)
MAX_NORM = 1.0  # of the gradients: about half of the steps are below it, so that a wrong factor shows
HELD_OUT = 5


def build(dtype: torch.dtype = torch.float64) -> nn.Module:
    with preserve_rng_state():
        seed_torch(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    return model.to(dtype)


def make_samples(count: int, dtype: torch.dtype = torch.float64) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    inputs = torch.randn(count, 6, dtype=torch.float64, generator=generator)
    targets = torch.randn(count, 3, dtype=torch.float64, generator=generator)
    return TensorDataset(inputs.to(dtype), targets.to(dtype))


def step(model: nn.Module, batch: Any) -> Tensor:
    inputs, targets = batch
    return nn.functional.mse_loss(model(inputs), targets)


def make_optimizer(model: nn.Module) -> torch.optim.Optimizer:
    # Not Adam, which divides by the size of the gradients: a wrong factor would not show.
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train_by_hand() -> dict[str, Any]:
    """Train on the CPU without tp, and return what a recorder of the script's run has, but for its order."""
    model = build()
    inputs, targets = make_samples(SAMPLES).tensors
    optimizer = make_optimizer(model)
    norms: dict[int, dict[str, float]] = {}
    metrics: dict[int, dict[str, float]] = {}
    for epoch in range(1, EPOCHS + 1):
        total = 0.0
        for first in range(0, SAMPLES, BATCH):
            batch = (inputs[first : first + BATCH], targets[first : first + BATCH])
            optimizer.zero_grad()
            loss = step(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM)
            optimizer.step()
            total += loss.item() * len(batch[0])
            norms[len(norms) + 1] = {name: p.detach().norm().item() for name, p in model.named_parameters()}
        with torch.no_grad():
            held_out = step(model, make_samples(HELD_OUT).tensors).item()
        metrics[epoch] = {"loss": total / SAMPLES, "val_loss": held_out}
    weights = {name: p.detach() for name, p in model.named_parameters()}
    states = {
        f"{name}:{key}": value
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }
    return {
        "backend": "single",
        "step": STEPS,
        "weights": weights,
        "buffers": {},
        "states": states,
        "norms": norms,
        "metrics": metrics,
        "rows": [],
        "is_drawn": False,
    }
