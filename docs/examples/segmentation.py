"""Say of each pixel whether it is ink, where some pixels count as nothing.

    python segmentation.py
    tp launch -n 2 segmentation.py
    TP_BACKEND=tuple python segmentation.py --devices cpu cpu

The pictures are two scans of digits, one on the other, with noise: class 0 is paper, 1 is ink of the upper
one, 2 is ink of the lower one. Pixels of middling gray are nobody's, and ignored; pictures have different
numbers of them, so the loss is a mean over pixels, and the step says over how many.
"""

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Trainer, Validation

CLASSES, IGNORED = 3, -100


def load_pictures() -> TensorDataset:
    """Return pictures (n, 1, 16, 8) and classes of their pixels (n, 16, 8)."""
    ink = torch.tensor(load_digits().images, dtype=torch.float32) / 16
    upper, lower = ink[:-1], ink[1:]
    inks = torch.cat([upper, lower], 1)  # (n, 16, 8)
    classes = (inks > 0.6).long()
    classes[:, 8:] *= 2
    classes[(inks > 0.3) & (inks <= 0.6)] = IGNORED
    noise = 0.2 * torch.randn(inks.shape, generator=torch.Generator().manual_seed(0))
    return TensorDataset((inks + noise)[:, None], classes)


def make_model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, 5, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 16, (9, 3), padding=(4, 1)),
        nn.ReLU(),
        nn.Conv2d(16, CLASSES, 1),
    )


class IntersectionOverUnion:
    """The mean over the classes, of all pixels of the whole set that count."""

    def __init__(self) -> None:
        self.counts = torch.zeros(CLASSES, CLASSES, dtype=torch.long)

    def update(self, scores: Tensor, classes: Tensor) -> None:
        counted = classes != IGNORED
        pairs = classes[counted] * CLASSES + scores.argmax(1)[counted]
        self.counts += pairs.bincount(minlength=CLASSES**2).reshape(CLASSES, CLASSES).cpu()

    def compute(self) -> float:
        both = self.counts.diag()
        return (both / (self.counts.sum(0) + self.counts.sum(1) - both)).mean().item()

    def reset(self) -> None:
        self.counts.zero_()


def step(model: nn.Module, batch: list[Tensor]) -> dict[str, object]:
    pictures, classes = batch
    scores = model(pictures)  # (batch, classes, 16, 8)
    loss = F.cross_entropy(scores, classes, ignore_index=IGNORED)
    return {"loss": loss, "weight": (classes != IGNORED).sum(), "iou": (scores, classes)}


def main(arguments: Sequence[str] | None = None) -> float:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--devices", nargs="+", default="auto")
    options = parser.parse_args(arguments)
    pictures = load_pictures()
    train, test = torch.utils.data.random_split(pictures, [0.8, 0.2], torch.Generator().manual_seed(0))
    with Trainer(devices=options.devices, seed=0) as trainer:
        torch.manual_seed(0)
        model = make_model()
        history = trainer.fit(
            model,
            torch.optim.AdamW(model.parameters(), lr=5e-3),
            DataLoader(train, batch_size=64, shuffle=True),
            step=step,
            epochs=options.epochs,
            validation=Validation(DataLoader(test, batch_size=64), metrics={"iou": IntersectionOverUnion()}),
        )
        if trainer.is_main:
            print(f"backend={trainer.selection.chosen.name} IoU={history[-1].val['iou']:.3f}")
    return history[-1].val["iou"]


if __name__ == "__main__":
    main()
