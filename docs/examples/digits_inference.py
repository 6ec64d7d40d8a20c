"""Read all scans of handwritten digits with a trained model, on one worker for each device.

First train the model: ``python digits.py`` leaves ``out/digits.safetensors``. This program loads it in each
worker, reads the 1,797 scans in batches, shows a progress bar, tells how many it got right, and
draws when each worker did what.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from digits import make_model
from sklearn.datasets import load_digits
from torch import Tensor
from tp_runner import OrderedRunner


class Reader(OrderedRunner):
    @staticmethod
    def producer_init(device: str, cfg: Any) -> None:
        model = make_model()
        model.load_state_dict(cfg.weights)
        cfg.model = model.to(device).eval()

    @staticmethod
    def producer_work(device: str, cfg: Any, data: Tensor) -> Tensor:
        with torch.inference_mode():
            scores = cfg.model(data.to(device))  # (batch, 10)
        return scores.argmax(dim=1).cpu()  # (batch,)

    @staticmethod
    def consumer_init(cfg: Any) -> None:
        cfg.digits = []

    @staticmethod
    def consumer_work(cfg: Any, data: Tensor) -> None:
        cfg.digits.append(data)

    @staticmethod
    def consumer_end(cfg: Any) -> Tensor:
        return torch.stack(cfg.digits)  # (scans,)


def draw_timeline(trace: Path, path: Path) -> None:
    """Draw what each worker did when, from a file in the Chrome trace format."""
    import matplotlib as mpl

    mpl.use("agg")  # no display is needed
    import matplotlib.pyplot as plt

    events = json.loads(trace.read_text())["traceEvents"]
    names = {event["tid"]: event["args"]["name"] for event in events if event["ph"] == "M"}
    figure, axes = plt.subplots(figsize=(9, 2.5), layout="constrained")
    for worker in names:
        mine = [event for event in events if event["ph"] == "X" and event["tid"] == worker]
        for waiting, color in ((False, "tab:blue"), (True, "lightgray")):
            bars = [e for e in mine if (e["name"] == "waiting") is waiting]
            spans = [(event["ts"] / 1e6, event["dur"] / 1e6) for event in bars]
            axes.broken_barh(spans, (worker - 0.3, 0.6), color=color)
    axes.set(xlabel="seconds", yticks=list(names), yticklabels=list(names.values()))
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", type=Path, default=Path("out/digits.safetensors"))
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for the timeline")
    parser.add_argument("--devices", nargs="+", default=["cpu", "cpu"])
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)

    scans = load_digits()
    images = torch.tensor(scans.images, dtype=torch.float32).unsqueeze(1) / 16  # (n, 1, 8, 8)
    labels = torch.tensor(scans.target)
    weights = torch.load(args.model, weights_only=True)
    cfg = {"weights": weights}
    with Reader(args.devices, cfg, batch=64, progress=True, timeline=True) as reader:
        digits = reader(images)
        stats = reader.stats()
        reader.write_timeline(args.out / "digits_inference.json")
    draw_timeline(args.out / "digits_inference.json", args.out / "digits_inference.png")
    accuracy = (digits == labels).float().mean().item()
    print(stats)
    print(f"{len(digits)} scans on {len(args.devices)} workers, accuracy={accuracy:.2f}")
    return accuracy


if __name__ == "__main__":
    main()
