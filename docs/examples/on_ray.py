"""Predict on workers of any kind: processes of this machine, threads, or actors of a Ray cluster.

python on_ray.py
python on_ray.py --engine ray
"""

import argparse
from collections.abc import Sequence

import torch
import tp_runner
from torch import Tensor, nn


def load(device: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2).to(device).eval()


def predict(model: nn.Module, batch: Tensor) -> Tensor:
    """Return the outputs (batch, 2) of a batch (batch, 4)."""
    with torch.inference_mode():
        return model(batch)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="process", choices=["process", "thread", "ray"])
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"], help="one worker for each")
    options = parser.parse_args(arguments)
    items = (torch.full((4,), float(number)) for number in range(1000))
    results = tp_runner.map(
        predict, items, devices=options.devices, engine=options.engine, init=load, batch=64, max_restarts=3
    )
    outputs = torch.stack(list(results))
    print(options.engine, tuple(outputs.shape), f"{outputs.sum().item():.1f}")


if __name__ == "__main__":
    main()
