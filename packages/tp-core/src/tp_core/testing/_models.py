"""What the model of the conformance kit has besides layers."""

from typing import Self

import torch
from torch import Tensor, nn

__all__ = ["Tail"]


class Tail(nn.Module):
    """What backends stumble over, behind the layers of a model: (batch, features) -> (batch, features).

    A batch norm brings buffers of floating point and of whole numbers; it stays in evaluation mode,
    since the statistics of a part of a batch are not those of the whole. One weight is used in two
    places, one layer is frozen, and one parameter has a single element.

    Args:
        features: How many features its input and its output have.
    """

    def __init__(self, features: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(features)
        self.norm.running_mean = torch.randn(features) / 4
        self.norm.running_var = torch.rand(features) + 0.5
        self.forth = nn.Linear(features, features, bias=False)
        self.back = nn.Linear(features, features, bias=False)
        self.back.weight = self.forth.weight
        self.frozen = nn.Linear(features, features).requires_grad_(requires_grad=False)
        self.scale = nn.Parameter(torch.tensor([1.5]))
        self.train()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of all but the batch norm."""
        super().train(mode)
        self.norm.eval()
        return self

    def forward(self, x: Tensor) -> Tensor:
        """Return what depends on all of it."""
        x = self.norm(x)
        x = self.back(torch.tanh(self.forth(x)))
        output: Tensor = self.scale * (x + self.frozen(x))
        return output
