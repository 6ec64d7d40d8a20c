"""Train a small convolutional network on scans of handwritten digits, on whatever is here.

The scans ship inside scikit-learn: 1,797 real ones of 8 x 8 pixels. The same file runs on one
device (``python digits.py``), on one process per device (``tp launch -n 2 digits.py``) and on any
other backend that is installed; nothing in it says which.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset, random_split
from tp_trainer import History, Trainer


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1),  # (batch, 32, 8, 8)
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, padding=1),  # (batch, 64, 8, 8)
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.MaxPool2d(2),  # (batch, 64, 4, 4)
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(64 * 4 * 4, 10),
    )


def load_data() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test scans; which is which does not depend on anything."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16  # (n, 1, 8, 8)
    labels = torch.tensor(digits.target)
    everything = TensorDataset(images, labels)
    train, test = random_split(everything, [0.8, 0.2], torch.Generator().manual_seed(0))
    return TensorDataset(*everything[train.indices]), TensorDataset(*everything[test.indices])


def step(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    images, labels = batch
    scores = model(images)  # (batch, 10)
    correct = scores.argmax(dim=1) == labels
    return {
        "loss": nn.functional.cross_entropy(scores, labels),
        "accuracy": correct.float().mean(),
    }


def draw_curves(history: History, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")  # no display is needed
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    epochs = [record.epoch for record in history]
    for axes, name in ((left, "loss"), (right, "accuracy")):
        axes.plot(epochs, [record.train[name] for record in history], label="training")
        axes.plot(epochs, [record.val[name] for record in history], label="test")
        axes.set(xlabel="epoch", ylabel=name)
        axes.grid(alpha=0.3)
        axes.legend()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--devices", default="auto")
    parser.add_argument("--out", type=Path, default=Path("out"), help="folder for model and curves")
    args = parser.parse_args(arguments)
    args.out.mkdir(parents=True, exist_ok=True)

    with Trainer(backend=args.backend, devices=args.devices, seed=0) as trainer:
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=1e-2)
        train, test = load_data()
        history = trainer.fit(
            model,
            optimizer,
            DataLoader(train, batch_size=64, shuffle=True),
            step=step,
            epochs=args.epochs,
            validation=DataLoader(test, batch_size=256),
            scheduler=torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.epochs),
        )
        trainer.export(model, args.out / "digits.safetensors")
        accuracy = history[-1].val["accuracy"]
        if trainer.is_main:
            draw_curves(history, args.out / "digits.png")
            print(trainer.selection)
            name = trainer.selection.chosen.name
            print(f"backend={name} device={trainer.device} accuracy={accuracy:.2f}", flush=True)
    return accuracy


if __name__ == "__main__":
    main()
