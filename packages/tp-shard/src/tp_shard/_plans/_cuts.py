"""Which features each rank has of a layer, as its style says."""

from torch import nn
from tp_core.errors import ConfigError

from tp_shard._plans._styles import Column, Row, Vocab
from tp_shard._split import Ranges, Split
from tp_shard.nn._heads import Heads, Holds, section_ranges
from tp_shard.nn._kinds import widths

__all__ = ["style_ranges", "style_split"]


def style_ranges(layer: nn.Module, style: Column | Row | Vocab, ranks: int) -> tuple[Ranges, ...] | None:
    """Return which features each rank has of a layer, ``None`` for even parts.

    Raises:
        ConfigError: The layer's features are not as many heads or sections as the style says.
    """
    if isinstance(style, Vocab):
        return None
    if isinstance(style, Column) and style.sections != 1:
        return section_ranges(widths(layer)[1], style.sections, ranks)
    if style.heads is None:
        return None
    kv = style.heads if style.kv_heads is None else style.kv_heads
    holds: Holds = style.holds if isinstance(style, Column) else "q"
    count = {"q": style.heads, "kv": kv, "qkv": style.heads + 2 * kv}[holds]
    size = widths(layer)[isinstance(style, Column)]
    if size % count:
        msg = f"{size} features are not {count} heads of the same size, as {style} says"
        raise ConfigError(msg)
    return Heads(style.heads, kv, ranks).ranges(size // count, holds)


def style_split(layer: nn.Module, style: Column | Row | Vocab, ranks: int) -> Split:
    """Return how the features of a layer are split."""
    size = widths(layer)[not isinstance(style, Row)]
    ranges = style_ranges(layer, style, ranks)
    return Split.even(0, size, ranks) if ranges is None else Split(0, size, ranges)
