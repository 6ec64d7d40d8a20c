"""Learn features without labels: two views of a picture find each other among those of all others (InfoNCE).

    python contrastive.py
    tp launch -n 2 contrastive.py

The pictures are scikit-learn's scans of digits; a view is moved by up to a pixel and has noise. Each rank
has its share of a batch, and the loss compares the features of all of them, so that it is the same on one
device and on many. At the end, views of scans that were not trained on look for their other view.
"""

import argparse
from collections.abc import Sequence

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset
from tp_trainer import Trainer

TEMPERATURE = 0.2


def make_model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))


def view(scans: Tensor) -> Tensor:
    """Return the scans (n, 8, 8), each moved by up to a pixel, with noise."""
    down, right = torch.randint(3, (2, len(scans), 1), device=scans.device)
    along = torch.arange(8, device=scans.device)
    number = torch.arange(len(scans), device=scans.device)[:, None, None]
    wide = F.pad(scans, (1, 1, 1, 1))
    moved = wide[number, (along + down)[:, :, None], (along + right)[:, None]]
    return moved + 0.05 * torch.randn_like(moved)


@torch.no_grad()
def found(model: nn.Module, scans: Tensor) -> float:
    """Return the share of scans whose two views are more similar than one and a view of any other."""
    left, right = (F.normalize(model(view(scans))) for _ in range(2))
    return ((left @ right.T).argmax(1) == torch.arange(len(scans))).float().mean().item()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=30)
    options = parser.parse_args(arguments)
    scans = torch.tensor(load_digits().images, dtype=torch.float32) / 16
    half = len(scans) // 2
    loader = DataLoader(TensorDataset(scans[:half]), batch_size=128, shuffle=True, drop_last=True)

    with Trainer(seed=0) as trainer:

        def step(model: nn.Module, batch: list[Tensor]) -> Tensor:
            (scans,) = batch
            left, right = (F.normalize(model(view(scans))) for _ in range(2))
            left, right = trainer.all_gather(left), trainer.all_gather(right)  # (samples of all ranks, 64)
            scores = left @ right.T / TEMPERATURE
            own = torch.arange(len(scores), device=scores.device)
            return (F.cross_entropy(scores, own) + F.cross_entropy(scores.T, own)) / 2

        torch.manual_seed(0)
        model = make_model()
        before = found(model, scans[half:])
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        trainer.fit(model, optimizer, loader, step=step, epochs=options.epochs)
        if trainer.is_main:
            model.cpu()
            after = found(model, scans[half:])
            print(f"views that find their other view: {before:.3f} before, {after:.3f} after")


if __name__ == "__main__":
    main()
