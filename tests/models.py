"""Small models that many tests train.

A test whose model has something special to it, such as a fault or a call of its own, defines that one itself.
"""

from itertools import pairwise

import torch
from torch import nn

__all__ = ["Block", "BlockNet", "perceptron"]


def perceptron(*sizes, seed=1, dtype=torch.float64):
    """Return linear layers of these sizes with tanh between them, drawn from the seed."""
    torch.manual_seed(seed)
    layers = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Tanh()]
    return nn.Sequential(*layers[:-1]).to(dtype)


class Block(nn.Module):
    """A residual block, the unit that is wrapped, recomputed, compiled, split or placed on a stage."""

    def __init__(self, width, hidden, *, norm=False, bias=True, activation=torch.tanh):
        super().__init__()
        self.norm = nn.LayerNorm(width) if norm else nn.Identity()
        self.up = nn.Linear(width, hidden, bias=bias)
        self.down = nn.Linear(hidden, width, bias=bias)
        self.activation = activation

    def forward(self, x):
        return x + self.down(self.activation(self.up(self.norm(x))))


class BlockNet(nn.Module):
    """Has blocks, a weight in two places, a frozen layer and a parameter of a single element."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        torch.manual_seed(1)
        self.into = nn.Linear(3, 5)
        self.blocks = nn.ModuleList(Block(5, 10) for _ in range(3))
        self.frozen = nn.Linear(5, 5).requires_grad_(requires_grad=False)
        self.out = nn.Linear(5, 1, bias=False)
        self.also_out = nn.Linear(5, 1)
        self.also_out.weight = self.out.weight
        self.scale = nn.Parameter(torch.ones(1))
        self.to(dtype)

    def encode(self, x):
        x = self.into(x)
        for block in self.blocks:
            x = block(x)
        return self.frozen(x)

    def forward(self, x):
        x = self.encode(x)
        return self.scale * (self.out(x) + self.also_out(x))
