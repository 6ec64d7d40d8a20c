"""Two towers that learn which rows belong together (InfoNCE): what the programs beside this file share."""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

EPOCHS, BATCH = 2, 8


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 4), nn.Linear(5, 4)
        self.scale = nn.Parameter(torch.tensor([0.5]))

    def forward(self, a, b):
        return F.normalize(self.a(a), dim=1), F.normalize(self.b(b), dim=1), self.scale


def loader():
    """Return batches of pairs; the last is not full."""
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(22, 3, generator=generator, dtype=torch.float64)
    ways = [torch.randn(3, n, generator=generator, dtype=torch.float64) for n in (6, 5)]
    return DataLoader(TensorDataset(*(hidden @ way for way in ways)), BATCH)


def make():
    torch.manual_seed(1)
    model = Towers().double()
    return model, torch.optim.AdamW(model.parameters(), lr=0.02)


def info_nce(a, b, scale):
    """Return the loss of pairs, whose others are all rows of the global batch."""
    scores = a @ b.T * scale.exp()
    targets = torch.arange(len(scores), device=scores.device)
    return (F.cross_entropy(scores, targets) + F.cross_entropy(scores.T, targets)) / 2


def report(model):
    """Print what the loss came to over all pairs, and the sum of all weights' sizes."""
    with torch.no_grad():
        print(f"loss {info_nce(*model(*loader().dataset.tensors)):.6f}")
        print(f"weights {sum(p.abs().sum() for p in model.parameters()):.6f}")
