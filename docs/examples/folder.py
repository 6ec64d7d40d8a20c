"""Classify all pictures of a folder, on one worker for each device; those that cannot be read are named.

    python folder.py --make pictures          # scans of digits as PNG files, and a model that reads them
    python folder.py pictures --output digits.csv
    tp run folder:Reader --input pictures --format files --batch 32 --output digits.jsonl

The last two find the same. Started again after an interruption, the command goes on where it was.
"""

import argparse
import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import nn
from tp_runner import OrderedRunner, WorkerError

WEIGHTS = Path("reader.safetensors")


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))


class Reader(OrderedRunner):
    """Reads digits from files of pictures, 8 x 8 pixels each."""

    @staticmethod
    def producer_init(device: str, cfg: Any) -> None:
        model = make_model()
        model.load_state_dict(load_file(WEIGHTS))
        cfg.model = model.to(device).eval()

    @staticmethod
    def producer_work(device: str, cfg: Any, data: list[str]) -> list[int]:
        pixels = np.stack([np.asarray(Image.open(path).convert("L")) for path in data])
        with torch.inference_mode():
            scores = cfg.model(torch.tensor(pixels, dtype=torch.float32, device=device) / 255)
        return scores.argmax(1).tolist()


def make_pictures(folder: Path) -> None:
    """Write the scans that scikit-learn brings as files, and a model that was trained on them."""
    from sklearn.datasets import load_digits
    from torch.utils.data import DataLoader, TensorDataset
    from tp_trainer import Trainer

    digits = load_digits()
    folder.mkdir(parents=True, exist_ok=True)
    for number, (scan, digit) in enumerate(zip(digits.images, digits.target, strict=True)):
        Image.fromarray((scan * 255 / 16).astype("uint8")).save(folder / f"{number:04}-{digit}.png")

    def step(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        return nn.functional.cross_entropy(model(batch[0]), batch[1])

    scans = TensorDataset(torch.tensor(digits.images, dtype=torch.float32) / 16, torch.tensor(digits.target))
    with Trainer(seed=0) as trainer:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        loader = DataLoader(scans, batch_size=64, shuffle=True)
        trainer.fit(model, optimizer, loader, step=step, epochs=10)
        trainer.export(model, WEIGHTS)


def read(folder: Path, output: Path, devices: str | int) -> None:
    """Write a table of the pictures, their digits and what was wrong with some."""
    paths = sorted(str(path) for path in folder.glob("*.png"))
    right = failed = 0
    # A picture that cannot be read fails its batch; tried again one by one, it alone is an error.
    options = {"batch": 32, "max_retries": 1, "on_error": "return"}
    with Reader(devices=devices, **options) as reader, output.open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["picture", "digit", "error"])
        for path, digit in zip(paths, reader.stream(paths), strict=True):
            if isinstance(digit, WorkerError):
                failed += 1
                table.writerow([path, "", digit.__cause__])
            else:
                right += path.endswith(f"-{digit}.png")
                table.writerow([path, digit, ""])
    print(f"{len(paths)} pictures, {right} read rightly, {failed} not readable")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--output", type=Path, default=Path("digits.csv"))
    parser.add_argument("--devices", default="auto", help="auto, or devices of torch: cuda:0,cuda:1")
    parser.add_argument("--make", action="store_true", help="make the pictures and the model first")
    options = parser.parse_args(arguments)
    if options.make:
        make_pictures(options.folder)
        return
    devices = options.devices.split(",") if options.devices != "auto" else "auto"
    read(options.folder, options.output, devices)


if __name__ == "__main__":
    main()
