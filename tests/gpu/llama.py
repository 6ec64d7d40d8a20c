"""A Llama-like language model, and how many floating-point operations its training takes.

The sizes are those of TinyLlama (Zhang et al., "TinyLlama: An Open-Source Small Language Model", 2024), with
1.1 billion weights, which fits one card with Adam in float32 and leaves room for its activations.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

PEAKS = {"H200": 989.4e12, "H100": 989.4e12, "A100": 312e12}
"""Operations in a second in bfloat16 without sparsity, from NVIDIA's data sheets of the SXM cards."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a model, and of a sample: ``length`` words."""

    width: int = 2048
    depth: int = 22
    heads: int = 32
    shared_heads: int = 4  # of keys and values
    inner: int = 5632
    words: int = 32_000
    length: int = 2048


TINY = Sizes(width=32, depth=2, heads=4, shared_heads=2, inner=64, words=50, length=16)


class Attention(nn.Module):
    """Causal attention with rotary positions: (batch, length, width) -> the same."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.per_head = sizes.width // sizes.heads
        shared = sizes.shared_heads * self.per_head
        self.query = nn.Linear(sizes.width, sizes.width, bias=False)
        self.key = nn.Linear(sizes.width, shared, bias=False)
        self.value = nn.Linear(sizes.width, shared, bias=False)
        self.out = nn.Linear(sizes.width, sizes.width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        def heads(y: Tensor) -> Tensor:
            return y.unflatten(-1, (-1, self.per_head)).transpose(1, 2)  # (batch, heads, length, per_head)

        q, k, v = heads(self.query(x)), heads(self.key(x)), heads(self.value(x))
        q, k = turned(q, turn), turned(k, turn)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a gated layer, each with its norm before it: (batch, length, width) -> the same."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.before_attention, self.before_inner = nn.RMSNorm(sizes.width), nn.RMSNorm(sizes.width)
        self.attention = Attention(sizes)
        self.gate = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.up = nn.Linear(sizes.width, sizes.inner, bias=False)
        self.down = nn.Linear(sizes.inner, sizes.width, bias=False)

    def forward(self, x: Tensor, turn: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), turn)
        y = self.before_inner(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Llama(nn.Module):
    """The model with its loss: words and targets, (batch, length) each -> a scalar."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.words = nn.Embedding(sizes.words, sizes.width)
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(sizes.depth))
        self.norm = nn.RMSNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.words, bias=False)
        half = sizes.width // sizes.heads // 2
        speeds = 10_000.0 ** (-torch.arange(half) / half)
        angles = torch.outer(torch.arange(sizes.length), speeds)  # (length, half)
        self.register_buffer("turn", torch.stack((angles.cos(), angles.sin())), persistent=False)
        for parameter in self.parameters():
            if parameter.dim() > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, words: Tensor, targets: Tensor) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x, self.turn)
        logits = self.head(self.norm(x))  # (batch, length, words)
        return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


def turned(x: Tensor, turn: Tensor) -> Tensor:
    """Return heads turned by their positions: (batch, heads, length, per_head) -> the same."""
    cos, sin = turn.to(x.dtype)
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def operations_of_a_token(model: Llama, sizes: Sizes) -> float:
    """Return the floating-point operations of one token's forward and backward pass.

    Source: Chowdhery et al., "PaLM: Scaling Language Modeling with Pathways", 2022, appendix B: 6 for each
    weight and 12 * depth * width * length for attention, whose mask does not count. Weights are those
    that are multiplied: the embedding, which is looked up, is left out.
    """
    weights = sum(p.numel() for p in model.parameters()) - model.words.weight.numel()
    return 6.0 * weights + 12.0 * sizes.depth * sizes.width * sizes.length


def utilization(operations_per_s: float, card: str) -> float | None:
    """Return which part of what a card can do in bfloat16 was done; ``None`` for one that is not known."""
    peak = next((value for name, value in PEAKS.items() if name in card), None)
    return None if peak is None else round(operations_per_s / peak, 4)
