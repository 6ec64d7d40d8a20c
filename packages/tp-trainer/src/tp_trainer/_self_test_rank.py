"""A process of ``tp test``: ``python -m tp_trainer._self_test_rank BACKEND DEVICES FOLDER``."""

import json
import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core.errors import SelectionError
from tp_core.plugins import Backend, registry
from tp_core.state import load_state

from tp_trainer import Trainer

# -- The small job, and the same by hand on one device --------------------------------------------


_SAMPLES, _BATCH, _EPOCHS, _RATE, _CLIP = 22, 4, 2, 0.1, 0.5  # the last batch is smaller than the others
_WEIGHTS, _LOSSES = "model.pt", "losses.json"


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a training.

    Attributes:
        weights: The whole model, on the CPU.
        losses: Means over an epoch, of training and validation in turn.
    """

    weights: dict[str, Tensor]
    losses: list[float]

    def difference(self, other: "Numbers") -> float:
        """Return the largest difference between two runs' numbers; infinite where names or counts differ."""
        same_shapes = {n: t.shape for n, t in self.weights.items()} == {
            n: t.shape for n, t in other.weights.items()
        }
        if not same_shapes or len(self.losses) != len(other.losses):
            return float("inf")
        pairs = [(torch.tensor(self.losses), torch.tensor(other.losses))]
        pairs += [(tensor, other.weights[name]) for name, tensor in self.weights.items()]
        found = [(a.double() - b.double()).abs().max().item() for a, b in pairs]
        return max(found) if all(value == value for value in found) else float("inf")  # noqa: PLR0124 - NaN


def type_of(devices: list[torch.device]) -> torch.dtype:
    """Return the type of the computation: float64, if every device has it."""
    return torch.float32 if any(device.type == "mps" for device in devices) else torch.float64


def _model(dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    return model.to(dtype)


def _data(count: int, dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    x, y = (torch.randn(count, n, dtype=torch.float64, generator=generator).to(dtype) for n in (6, 3))
    return TensorDataset(x, y)


def _step(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9)


def reference(dtype: torch.dtype) -> Numbers:
    """Train by hand on the CPU, without tp."""
    model, data, few = _model(dtype), _data(_SAMPLES, dtype).tensors, _data(5, dtype)
    optimizer, losses = _optimizer(model), []
    for _ in range(_EPOCHS):
        total = 0.0
        for first in range(0, _SAMPLES, _BATCH):
            batch = [tensor[first : first + _BATCH] for tensor in data]
            optimizer.zero_grad()
            loss = _step(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
            optimizer.step()
            total += loss.item() * len(batch[0])
        with torch.no_grad():
            losses += [total / _SAMPLES, _step(model, few.tensors).item()]
    return Numbers(dict(model.state_dict()), losses)


def train(backend: Backend[Any], devices: list[torch.device], folder: Path) -> None:
    """Train on a backend, and write the numbers into ``folder``; call it on every rank."""
    dtype = type_of(devices)
    few = DataLoader(_data(5, dtype), batch_size=_BATCH)
    with Trainer(backend=backend.name, devices=devices, seed=0, progress=False) as trainer:
        model = backend.adapt_model(_model(dtype), _data(_SAMPLES, dtype).tensors[0])
        history = trainer.fit(
            model,
            _optimizer(model),
            DataLoader(_data(_SAMPLES, dtype), batch_size=_BATCH),
            step=_step,
            epochs=_EPOCHS,
            validation=few,
            clip_norm=_CLIP,
        )
        losses = [means["loss"] for record in history for means in (record.train, record.val)]
        trainer.save_model(model, folder / _WEIGHTS)
        if trainer.is_main:
            (folder / _LOSSES).write_text(json.dumps(losses))


def read_numbers(folder: Path) -> Numbers:
    """Return the numbers that :func:`train` has written.

    Raises:
        FileNotFoundError: The training left no numbers.
        StateError: The weights that the training left are damaged.
        ValueError: The losses that the training left are damaged.
    """
    return Numbers(dict(load_state(folder / _WEIGHTS)), json.loads((folder / _LOSSES).read_text()))


# -- A process of ``tp test`` ---------------------------------------------------------------------


def main(name: str, devices: str, folder: Path) -> None:
    """Train on a backend; write the reason of a failure into ``folder``."""
    try:
        backend = next(c.item for c in registry.backends() if c.item.name == name)
        train(backend, [torch.device(device) for device in devices.split(",")], folder)
    except BaseException as error:
        said = {"unfit": isinstance(error, SelectionError), "reason": f"{type(error).__name__}: {error}"}
        (folder / f"error-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(said))
        raise


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
