"""Draws the pictures of the recipes: python docs/pictures/recipes.py [NAME ...]

Each recipe's own program makes what its picture shows. Text and lines are gray, and read on light and on dark
pages.
"""

import importlib.util
import json
import os
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import matplotlib as mpl
import torch
from torch.utils.data import DataLoader, Subset

mpl.use("agg")  # no display is needed
import matplotlib.pyplot as plt

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parent / "examples"
TP = Path(sysconfig.get_path("scripts"), "tp")
GRAY, FIRST, SECOND = "#7d8188", "#2f6fed", "#d97706"
GRAYS = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
LOOKS = {"svg.hashsalt": "tp", "svg.fonttype": "none", "font.size": 12, "savefig.transparent": True}
LOOKS |= dict.fromkeys(GRAYS, GRAY)


def load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def segmentation(path: Path) -> None:
    """Three pictures that were not trained on, their classes, and those that were found."""
    from tp_trainer import Trainer

    program = load("segmentation")

    def step(*given: Any) -> dict[str, Any]:
        return {name: value for name, value in program.step(*given).items() if name != "iou"}

    pictures = program.load_pictures()
    with Trainer(devices="cpu", seed=0, progress=False) as trainer:
        model = program.make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
        train = DataLoader(Subset(pictures, range(1400)), batch_size=64, shuffle=True)
        trainer.fit(model, optimizer, train, step=step, epochs=4)
    shown, classes = pictures[torch.arange(1500, 1506)]
    with torch.no_grad():
        found = model(shown).argmax(1)
    colors = mpl.colors.ListedColormap([GRAY, "white", FIRST, SECOND])
    figure, axes = plt.subplots(3, 6, figsize=(6, 6), layout="constrained")
    for row, (title, images, color) in enumerate(
        [("picture", shown[:, 0], "gray"), ("classes", classes, colors), ("found", found, colors)]
    ):
        for axis, image in zip(axes[row], images, strict=True):
            ranges = {} if color == "gray" else {"vmin": -1, "vmax": 2}
            axis.imshow(image.clamp(min=-1), cmap=color, **ranges)
            axis.set(xticks=[], yticks=[])
        axes[row, 0].set_ylabel(title)
    figure.savefig(path)


def contrastive(path: Path) -> None:
    """How similar 24 scans' first views are to their second ones, before and after."""
    program, models = load("contrastive"), []
    own = program.make_model

    def make_model() -> torch.nn.Module:
        models.append(own())
        return models[0]

    program.make_model = make_model
    scans = torch.tensor(program.load_digits().images[-24:], dtype=torch.float32) / 16
    torch.manual_seed(0)
    similar = [_similarity(program, own(), scans)]
    program.main(["--epochs", "20"])
    similar.append(_similarity(program, models[0], scans))
    figure, axes = plt.subplots(1, 2, figsize=(7, 3.6), layout="constrained", sharey=True)
    for axis, title, each in zip(axes, ("before", "after 20 epochs"), similar, strict=True):
        picture = axis.imshow(each, vmin=0, vmax=1, cmap="cividis")
        axis.set(title=title, xlabel="second view of", xticks=[0, 12, 23], yticks=[0, 12, 23])
    axes[0].set_ylabel("first view of")
    figure.colorbar(picture, label="cosine")
    figure.savefig(path)


def _similarity(program: Any, model: torch.nn.Module, scans: torch.Tensor) -> torch.Tensor:
    torch.manual_seed(1)
    with torch.no_grad():
        left, right = (torch.nn.functional.normalize(model(program.view(scans))) for _ in range(2))
    return left @ right.T


def gan(path: Path) -> None:
    """Points of the circle, and those that the generator makes after some epochs."""
    program = load("gan")
    figure, axes = plt.subplots(1, 3, figsize=(7, 2.7), layout="constrained", sharey=True)
    real = program.circle(60).tensors[0]
    for axis, epochs in zip(axes, (3, 50, 300), strict=True):
        # A checkpoint of each; the run is resumed from the one before.
        sys.argv = ["gan.py", "--epochs", str(epochs)]
        program.main()
        gen = torch.nn.Sequential(torch.nn.Linear(2, 32), torch.nn.Tanh(), torch.nn.Linear(32, 2))
        gen.load_state_dict(_model("gan-run", "gen"))
        torch.manual_seed(0)
        with torch.no_grad():
            made = gen(torch.randn(100, 2))
        axis.plot(*real.T, color=GRAY)
        axis.scatter(*made.T, s=6, color=FIRST)
        axis.set(title=f"{epochs} epochs", aspect="equal", xlim=(-2, 2), ylim=(-2, 2), xticks=[], yticks=[])
    figure.savefig(path)


def _model(folder: str, name: str) -> dict[str, torch.Tensor]:
    """Return the weights of one model of a run."""
    from safetensors.torch import load_file

    subprocess.run([TP, "convert", folder, f"{name}.safetensors", "--model", name, "--overwrite"], check=True)
    return load_file(f"{name}.safetensors")


def reinforce(path: Path) -> None:
    """How long a game lasts in each round."""
    lengths = load("reinforce").main(["--rounds", "30"])
    figure, axis = plt.subplots(figsize=(7, 2.8), layout="constrained")
    axis.plot(range(1, len(lengths) + 1), lengths, color=FIRST)
    axis.axhline(200, color=GRAY, linestyle=":")
    axis.set(xlabel="round", ylabel="steps of a game", ylim=(0, 210))
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path)


def stages(path: Path) -> None:
    """What two processes do in a step, by two schedules."""
    figure, axes = plt.subplots(2, 1, figsize=(7, 3.2), layout="constrained")
    for axis, schedule in zip(axes, ("1F1B", "ZBVZeroBubble"), strict=True):
        trace = f"{schedule}.json"
        command = [TP, "launch", "-n", "2", EXAMPLES / "stages.py", "--epochs", "1", "--out", schedule]
        subprocess.run([*command, "--schedule", schedule, "--trace", trace], check=True)
        for event in json.loads(Path(trace).read_text())["traceEvents"]:
            if event["ph"] == "X":
                color = FIRST if event["name"].startswith("forward") else SECOND
                at, took = event["ts"] / 1e3, event["dur"] / 1e3
                axis.barh(event["tid"], took, left=at, color=color, edgecolor=GRAY, linewidth=0.5)
                if event["name"].startswith("forward"):
                    at += took / 2
                    number = event["args"]["micro-batch"]
                    axis.text(at, event["tid"], number, color="white", ha="center", va="center")
        axis.set(xticks=[], yticks=[0, 1], yticklabels=["rank 0", "rank 1"], title=schedule)
        axis.invert_yaxis()
        axis.spines[["top", "right", "left"]].set_visible(False)
    axes[1].set_xlabel("time (a scale of its own in each); blue forward, orange backward")
    figure.savefig(path)


PICTURES: dict[str, Callable[[Path], None]] = {
    each.__name__: each for each in (contrastive, gan, reinforce, segmentation, stages)
}


def main() -> None:
    for name in sys.argv[1:] or PICTURES:
        with tempfile.TemporaryDirectory() as folder, plt.style.context(LOOKS):
            os.chdir(folder)
            path = FOLDER / f"{name}.svg"
            PICTURES[name](path)
            print(path, path.stat().st_size // 1000, "kB")


if __name__ == "__main__":
    main()
