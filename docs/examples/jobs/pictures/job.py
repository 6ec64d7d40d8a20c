"""A classifier of pictures that are mixed in pairs: what the programs beside this file share."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

EPOCHS, BATCH = 12, 8


def pictures(n, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, 3, 8, 8, generator=generator, dtype=torch.float64)
    y = (x.mean((1, 2, 3)) > 0).long()
    pair = torch.randperm(n, generator=generator)
    share = torch.rand(n, 1, 1, 1, generator=generator, dtype=torch.float64)
    return list(zip(share * x + (1 - share) * x[pair], y, y[pair], share.flatten(), strict=True))


def loaders():
    """Return batches to train and to validate with; the last of each is not full."""
    return DataLoader(pictures(37, seed=0), BATCH), DataLoader(pictures(17, seed=1), BATCH)


def make():
    """Return the model, its optimizer, and one cycle of the learning rate by steps."""
    torch.manual_seed(0)
    body = [nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 36, 2)]
    model = nn.Sequential(*body).double()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    return model, optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=5 * EPOCHS)


def mixed_loss(model, batch):
    """Return the mean loss of both labels, smoothed, each with its share in the picture."""
    x, mine, other, share = batch
    scores = model(x)
    losses = [F.cross_entropy(scores, y, label_smoothing=0.1, reduction="none") for y in (mine, other)]
    return (share * losses[0] + (1 - share) * losses[1]).mean()


def report(model, epochs, val_loss):
    """Print after how many epochs training ended, its last validation, and the averaged weights' sizes."""
    print(f"epochs {epochs}")
    print(f"val_loss {val_loss:.6f}")
    print(f"averaged {sum(p.detach().abs().sum() for p in model.parameters()):.6f}")
