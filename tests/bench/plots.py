"""Plots of the main comparisons, drawn from the measured figures; `tests.bench.render` writes them.

Each is an SVG file whose description is the digest of what it shows, so that a test can tell whether it is
drawn of the figures that are there. Colors and text are readable on light and on dark pages.
"""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.bench._results import FOLDER

__all__ = ["PLOTS", "digest_of", "draw"]

GRAY, OURS, THEIRS = "#767a80", "#2f6fed", "#b0793c"
STYLE = {
    "svg.hashsalt": "tp",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": GRAY,
    "axes.labelcolor": GRAY,
    "axes.edgecolor": GRAY,
    "xtick.color": GRAY,
    "ytick.color": GRAY,
    "axes.spines.top": False,
    "axes.spines.right": False,
}

Rows = list[tuple[str, float]]
Curves = dict[str, list[tuple[int, float]]]


def figures(name: str, folder: Path = FOLDER) -> dict[str, float]:
    """Return the figures of one benchmark."""
    found: dict[str, float] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))["figures"]
    return found


def steps(folder: Path) -> Rows:
    """Return times of a tiny model's step, as multiples of a loop by hand."""
    found, place = figures("trainer-one-process", folder), "batches from a list"
    names = {
        "tp prepare": "tp, own loop",
        "tp fit": "tp, fit",
        "fabric": "Fabric",
        "accelerate": "Accelerate",
    }
    return [("by hand", 1.0), *((label, found[f"{place}, {name}: ratio"]) for name, label in names.items())]


def equipped(folder: Path) -> Rows:
    """Return the same with loggers, callbacks and a metric."""
    found, place = figures("trainer-equipped", folder), "with loggers, callbacks and an accuracy"
    names = {
        "tp fit": "tp, fit",
        "fabric, doing the same by hand": "Fabric, by hand",
        "accelerate, doing the same by hand": "Accelerate, by hand",
        "lightning": "Lightning",
        "transformers": "Hugging Face's Trainer",
    }
    return [("by hand", 1.0), *((label, found[f"{place}, {name}: ratio"]) for name, label in names.items())]


def items(folder: Path) -> Rows:
    """Return the times of 1 MB arrays there and back, as multiples of tp-runner's."""
    found = figures("runner", folder)
    names = {
        "executor": "concurrent.futures",
        "Pool.imap": "Pool",
        "joblib": "joblib",
        "mpire": "mpire",
        "ray ActorPool": "Ray",
        "easycore": "easycore",
    }
    return [
        ("tp-runner", 1.0),
        *((label, found[f"1 MB arrays, {name}: ratio"]) for name, label in names.items()),
    ]


def head(folder: Path) -> Rows:
    """Return what a rank holds of a head of a million classes, in MiB."""
    found = figures("shard-head-1000000", folder)
    names = {
        "unsharded": "whole, one rank",
        "tp_shard": "tp-shard",
        "DTensor": "DTensor",
        "torchshard": "torchshard",
    }
    return [(label, found[f"{name}: held"]) for name, label in names.items()]


def growth(folder: Path) -> Curves:
    """Return milliseconds by the number of ranks: of real ranks, for each, and of one simulated rank."""

    def curve(name: str, label: str, ending: str = "") -> list[tuple[int, float]]:
        head, tail = f"{label}, ", f" ranks{ending}"
        found = {n: v for n, v in figures(name, folder).items() if n.startswith(head) and n.endswith(tail)}
        return sorted((int(n[len(head) : -len(tail)]), v) for n, v in found.items())

    real = ("launch to end", "agreement", "a batch", "checkpoint")
    return {
        **{f"{n}, each real rank": curve("trainer-growth-real", n, ": for each rank") for n in real},
        "agreement, simulated": curve("trainer-growth-simulated", "agreement on rank 0"),
        "order of a batch, simulated": curve("trainer-growth-simulated", "order of a batch"),
    }


PLOTS: dict[str, tuple[Callable[[Path], Rows | Curves], str]] = {
    "equipped": (equipped, "with loggers, callbacks and a metric: times by hand"),
    "growth": (growth, "milliseconds by the number of ranks"),
    "head": (head, "a head of 1M classes: MiB that each of two ranks holds"),
    "items": (items, "1 MB arrays there and back: times tp-runner"),
    "steps": (steps, "a step of a tiny model: times a loop by hand"),
}


def digest_of(name: str, folder: Path = FOLDER) -> str:
    """Return the digest of what a plot shows."""
    rows, title = PLOTS[name][0](folder), PLOTS[name][1]
    return hashlib.sha256(json.dumps([title, rows]).encode()).hexdigest()


def draw(out: Path, folder: Path = FOLDER) -> list[Path]:
    """Draw all plots into a folder, and return their paths."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    out.mkdir(parents=True, exist_ok=True)
    paths = []
    with mpl.rc_context(STYLE):
        for name, (rows_of, title) in PLOTS.items():
            shown = rows_of(folder)
            height = 4.2 if isinstance(shown, dict) else 0.55 + 0.36 * len(shown)
            figure = Figure(figsize=(6.4, height), layout="constrained")
            axes: Any = figure.subplots()
            (_lines if isinstance(shown, dict) else _bars)(axes, shown)
            axes.set_title(title, loc="left", fontsize=11)
            path = out / f"{name}.svg"
            metadata = {"Date": None, "Creator": None, "Description": digest_of(name, folder)}
            figure.savefig(path, transparent=True, metadata=metadata)
            paths.append(path)
    return paths


def _bars(axes: Any, rows: Rows) -> None:
    labels, values = zip(*reversed(rows), strict=True)
    colors = [OURS if label.startswith("tp") else THEIRS for label in labels]
    bars = axes.barh(labels, values, color=colors, height=0.62)
    axes.bar_label(bars, [f"{value:,.0f}" if value >= 100 else f"{value:.3g}" for value in values], padding=4)
    axes.xaxis.set_visible(False)
    axes.spines["bottom"].set_visible(False)
    axes.margins(x=0.12)


def _lines(axes: Any, curves: Curves) -> None:
    marks = ("o-", "s-", "^-", "D-", "v-", "P-")
    for number, ((label, points), mark) in enumerate(zip(curves.items(), marks, strict=True)):
        ranks, values = zip(*points, strict=True)
        color = THEIRS if "simulated" in label else OURS
        axes.plot(ranks, values, mark, color=color, alpha=1 - 0.15 * (number % 4), markersize=5, label=label)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("ranks")
    axes.legend(fontsize=8, frameon=False, labelcolor=GRAY, loc="lower right")
