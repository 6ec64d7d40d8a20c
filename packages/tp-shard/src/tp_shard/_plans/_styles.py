"""The styles of a plan: each says how a module is split."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from tp_core.arguments import explain_init
from tp_core.errors import ConfigError

from tp_shard.nn._heads import Holds

_explain_style = partial(
    explain_init, instead={"dim": "Column() to split output features, or Row() to split input features"}
)


@_explain_style
@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A linear layer with split output features, or a table of numbers for each head.

    Megatron-LM's column-parallel layer (arXiv:1909.08053): a weight of shape (out, in) becomes
    (local out, in) on each rank, its output (..., local out).

    Attributes:
        gather_output: Whether to join outputs, so that anything can follow.
        sections: The number of equal layers that it fuses, each of which is split: 2 for a gate and an up
            layer.
        heads: The number of query heads, which stay whole.
        kv_heads: The number of key heads; as many as query heads by default. If they are fewer than the
            ranks, several ranks hold the same one.
        holds: The heads that it makes: "q", "kv" for keys or values, "qkv" for all in one.
    """

    gather_output: bool = False
    sections: int = 1
    heads: int | None = None
    kv_heads: int | None = None
    holds: Holds = "q"

    def __post_init__(self) -> None:
        _check_heads("Column", self.heads, self.kv_heads)


@_explain_style
@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A linear layer with split input features.

    Megatron-LM's row-parallel layer (arXiv:1909.08053): a weight of shape (out, in) becomes (out, local in)
    on each rank, its input (..., local in); its output (..., out) is summed over the ranks.

    Attributes:
        heads: The number of query heads, if its input is the output of a head-parallel attention.
        kv_heads: The number of key heads; as many as query heads by default.
    """

    heads: int | None = None
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        _check_heads("Row", self.heads, self.kv_heads)


def _check_heads(style: str, heads: int | None, kv_heads: int | None) -> None:
    for name, value in (("heads", heads), ("kv_heads", kv_heads)):
        if value is not None and (not isinstance(value, int) or value < 1):
            msg = f"{style}({name}=...) must be a whole number from 1, or None, got {value!r}"
            raise ConfigError(msg)


@_explain_style
@dataclass(frozen=True, slots=True, kw_only=True)
class Vocab:
    """An embedding or a linear head with split classes; tied ones stay tied.

    A weight of shape (classes, features) becomes (local classes, features) on each rank.

    Attributes:
        gather_output: Whether to join a head's logits; split ones need a parallel loss.
    """

    gather_output: bool = False


@_explain_style
@dataclass(frozen=True, slots=True)
class Sequence:
    """A module on a part of the sequence: a norm, a dropout, an embedding of positions, a list of blocks.

    Sequence parallelism (arXiv:2205.05198): of (batch, seq, features) each rank has (batch, local seq,
    features). The gradients of norms are summed over the ranks. Dropouts draw the rank's own random numbers.
    The output of an embedding is split. In an ``nn.ModuleList`` of blocks, the input of the first block is
    split and the output of the last one is joined. All of the blocks draw the rank's own random numbers.
    """


@_explain_style
@dataclass(frozen=True, slots=True)
class Replicated:
    """A module between column and row layers, where each rank has its own heads or features.

    Its parameters are the same on all ranks, and it works on each rank's part: a norm of every head's queries
    or keys, a PReLU with one slope. Their gradients are summed over the ranks. Dropout needs no style:
    between column and row layers each rank draws its own random numbers anyway.
    """


@_explain_style
@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """An attention around split layers with code that counts heads: it has to count the heads of its rank.

    Numbers are attributes of the module. With the prefix ``config.`` they are attributes of its ``config``,
    and the module gets its own copy of that.

    Attributes:
        heads: The number of query heads over all ranks.
        kv_heads: The number of key heads; as many as query heads by default.
        query: Numbers in proportion to its query heads, such as ``("num_heads", "embed_dim")``.
        shared: Numbers in proportion to its key heads.
        groups: Numbers of query heads that share a key head.
        inputs: Arguments of its ``forward`` with all heads, such as ``("alibi",)``: in the second of four
            dimensions, or in the first one, alone or inside each sample. Each rank takes its own heads.
        parameters: Its own parameters with query heads in their first dimension, which are split.
    """

    heads: int
    kv_heads: int | None = None
    query: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


@_explain_style
@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """A block that takes whole sequences, in a model that works on parts of them (arXiv:2205.05198).

    Its input is gathered once, for all column layers in it. Its row layers reduce-scatter their outputs.

    Attributes:
        inputs: The keyword arguments that come in parts; by default the first tensor alone.
        whole: Whether its output is whole, because nothing in it is split or all of it is joined. Then each
            rank takes its part of the output.
        local: The block's own numbers that count heads, if there are any.
    """

    inputs: tuple[str, ...] = ()
    whole: bool = False
    local: Local | None = None


@_explain_style
@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Experts with weights that are parameters of one module, of shape (experts, out, in).

    Every rank has its part of the hidden features of each expert; the outputs are summed over the ranks.

    Attributes:
        columns: Parameters with split outputs: weights, and biases of shape (experts, out).
        rows: Weights with split inputs.
        sections: The number of equal layers that a column parameter fuses, each of which is split: 2 for a
            gate and an up layer one after another, 1 if their features alternate.
        transposed: Whether weights have shape (experts, in, out).
        once: Parameters that are added to the sum once: biases of the row weights.
    """

    columns: tuple[str, ...] = ("gate_up_proj",)
    rows: tuple[str, ...] = ("down_proj",)
    sections: int = 2
    transposed: bool = False
    once: tuple[str, ...] = ()


Style: TypeAlias = Column | Row | Vocab | Sequence | Replicated | Local | Gathered | Experts
Plan: TypeAlias = Mapping[str, Style]
