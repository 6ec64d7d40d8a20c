"""Draws the picture of the README: a run that is interrupted and resumed, over one that is not.

    hatch run picture
    hatch run picture --report docs/report.png

Trains a classifier of handwritten digits on two processes to its end. Then again, but sends one rank SIGTERM
halfway, and continues in one process. The curves are what these three runs have left in
their folders. With ``--report``, Chromium photographs the head of the resumed run's report.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from tp_trainer import Callback, Checkpoints, RunView, Trainer, Validation

STEPS, BATCH = 240, 16
SIGNALLED_AT = 70
VALIDATED_EVERY = 4  # steps
TP = str(Path(sysconfig.get_path("scripts"), "tp"))


class Interruption(Callback):
    """What a scheduler does when the time is up."""

    def on_step_end(self, run: RunView) -> None:
        if run.step == SIGNALLED_AT and run.is_main:
            os.kill(os.getpid(), signal.SIGTERM)


def step(model, batch):
    images, labels = batch
    return nn.functional.cross_entropy(model(images), labels)


def train(folder: Path, *, interrupted: bool) -> None:
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).flatten(1) / 16  # (n, 64)
    scans = TensorDataset(images, torch.tensor(digits.target))
    train_scans, test_scans = random_split(scans, [0.8, 0.2], torch.Generator().manual_seed(0))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    callbacks = [Interruption()] if interrupted else []
    with Trainer(seed=0, progress=False) as trainer:
        trainer.fit(
            model,
            optimizer,
            DataLoader(train_scans, batch_size=BATCH, shuffle=True),
            step=step,
            max_steps=STEPS,
            validation=Validation(DataLoader(test_scans, batch_size=128), every_steps=VALIDATED_EVERY),
            checkpoint=Checkpoints(folder),
            resume="auto",
            callbacks=callbacks,
            log=["jsonl"],
        )


def run(folder: Path, *, processes: int, interrupted: bool = False) -> None:
    """Train in other processes."""
    launch = [TP, "launch", "-n", str(processes)]
    command = [*(launch if processes > 1 else [sys.executable]), __file__, "--folder", str(folder)]
    done = subprocess.run([*command, *(["--interrupted"] if interrupted else [])], timeout=600, check=False)
    if done.returncode != (128 + signal.SIGTERM if interrupted else 0):
        raise RuntimeError(f"{command} has ended with status {done.returncode}")


def losses(folder: Path) -> dict[int, float]:
    """Return the loss of the test scans after each step that was followed by a validation."""
    found = {}
    for line in (folder / "log.jsonl").read_text().splitlines():
        entry = json.loads(line)
        if entry["type"] == "numbers" and "val_loss" in entry["numbers"]:
            found[entry["step"]] = entry["numbers"]["val_loss"]
    return found


def draw(path: Path, whole: dict[int, float], resumed: dict[int, float], saved: int, *, dark: bool) -> None:
    """Draw the picture, on a light or a dark ground; it is read at the width of a phone, too."""
    import matplotlib as mpl

    mpl.use("agg")  # no display is needed
    import matplotlib.pyplot as plt

    band, first, second = ("#3b4a63", "#fb923c", "#4ade80") if dark else ("#c9d6ea", "#c2410c", "#15803d")
    looks = {"font.size": 13, "figure.facecolor": "#131416" if dark else "white", "savefig.dpi": 110}
    with plt.style.context(["dark_background" if dark else "default", looks | {"axes.facecolor": "none"}]):
        figure, axes = plt.subplots(figsize=(8, 4.2), layout="constrained")
        axes.plot(*zip(*whole.items(), strict=True), linewidth=8, color=band, label="two processes")
        before = {at: loss for at, loss in resumed.items() if at <= saved}
        after = {at: loss for at, loss in resumed.items() if at >= max(before)}
        axes.plot(*zip(*before.items(), strict=True), color=first, label="two processes, ended by SIGTERM")
        axes.plot(*zip(*after.items(), strict=True), color=second, label="resumed in one process")
        axes.axvline(saved, color=first, linestyle=":")
        axes.set(xlabel="optimizer step", ylabel="validation loss")
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
        figure.savefig(path)
        plt.close(figure)


def photograph(folder: Path, path: Path, profile: Path) -> None:
    """Make the report of a run, and pictures of its head as a browser shows it, light and dark."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        raise RuntimeError("--report needs Chromium (Debian: chromium)")
    page = folder / "report.html"
    subprocess.run([TP, "report", str(folder), "--out", str(page)], timeout=600, check=True)
    flags = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run"]
    flags += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]
    flags += [f"--user-data-dir={profile}", "--window-size=1000,1080"]
    for scheme, out in enumerate((path.with_stem(f"{path.stem}-dark"), path)):  # Blink's numbers of both
        flags_of_one = [f"--blink-settings=preferredColorScheme={scheme}", f"--screenshot={out.resolve()}"]
        command = [chromium, *flags, *flags_of_one, page.as_uri()]
        subprocess.run(command, timeout=600, check=True, stderr=subprocess.DEVNULL)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path(__file__).with_suffix(".png"))
    parser.add_argument("--report", type=Path, help="photograph the report of the resumed run, too")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--interrupted", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        train(args.folder, interrupted=args.interrupted)
        return
    with tempfile.TemporaryDirectory() as folder:
        whole, resumed = Path(folder, "whole"), Path(folder, "resumed")
        run(whole, processes=2)
        run(resumed, processes=2, interrupted=True)
        saved = int(max(resumed.glob("step-*")).name.removeprefix("step-"))
        run(resumed, processes=1)
        one, other = losses(whole), losses(resumed)
        for out, dark in ((args.out, False), (args.out.with_stem(f"{args.out.stem}-dark"), True)):
            draw(out, one, other, saved, dark=dark)
        difference = max(abs(loss - other[at]) for at, loss in one.items())
        if args.report is not None:
            photograph(resumed, args.report, Path(folder, "profile"))
    print(f"{args.out}: largest difference {difference:.1e}")


if __name__ == "__main__":
    main()
