"""The styles of which plans are made: what may become of a module."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeAlias

from tp_shard.nn._heads import Holds


@dataclass(frozen=True, slots=True, kw_only=True)
class Column:
    """A linear layer, or a table of numbers for each head, whose output features are split.

    Megatron-LM's column-parallel layer (arXiv:1909.08053): a weight of shape (out, in) becomes
    (local out, in) on each rank, its output (..., local out).

    Attributes:
        gather_output: Whether outputs are joined, so that anything can follow.
        sections: How many equal layers it fuses, each of which is split: 2 for a gate and an up layer.
        heads: The number of query heads, which stay whole.
        kv_heads: The number of key heads; as many by default. If they are fewer than the ranks,
            several ranks hold the same one.
        holds: Which heads it makes: "q", "kv" for keys or values, "qkv" for all in one.
    """

    gather_output: bool = False
    sections: int = 1
    heads: int | None = None
    kv_heads: int | None = None
    holds: Holds = "q"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A linear layer whose input features are split.

    Megatron-LM's row-parallel layer (arXiv:1909.08053): a weight of shape (out, in) becomes (out, local in)
    on each rank, its input (..., local in); its output (..., out) is summed over the ranks.

    Attributes:
        heads: The number of query heads, if it takes those of a head-parallel attention.
        kv_heads: The number of key heads; as many by default.
    """

    heads: int | None = None
    kv_heads: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Vocab:
    """An embedding, or a linear head, whose classes are split; tied ones stay tied.

    A weight of shape (classes, features) becomes (local classes, features) on each rank.

    Attributes:
        gather_output: Whether a head's logits are joined; without it they go to a parallel loss.
    """

    gather_output: bool = False


@dataclass(frozen=True, slots=True)
class Sequence:
    """What works on a part of the sequence: a norm, a dropout, an embedding of positions, a list of blocks.

    Sequence parallelism (arXiv:2205.05198): of (batch, seq, features) each rank has (batch, local seq,
    features). Norms get the sum of the ranks' gradients, dropouts draw from the rank's own random numbers,
    the output of an embedding is split. The first block of an ``nn.ModuleList`` gets a part of what comes
    whole, the output of the last one is joined, and all of them draw the rank's own random numbers.
    """


@dataclass(frozen=True, slots=True)
class Replicated:
    """What stands between column and row layers, where each rank has its own heads or features.

    Its parameters are the same on all ranks and it works on each rank's part: a norm of every head's
    queries or keys, a PReLU with one slope. Their gradients are summed over the ranks. Dropout
    needs no style: between column and row layers each rank draws its own random numbers anyway.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class Local:
    """An attention around split layers whose own code counts heads, and has to count those of its rank.

    Numbers are attributes of the module, or with ``config.`` before them of its ``config``, of which it
    then gets a copy of its own.

    Attributes:
        heads: The number of query heads over all ranks.
        kv_heads: The number of key heads; as many by default.
        query: Numbers that are in proportion to its query heads, such as ``("num_heads", "embed_dim")``.
        shared: Numbers that are in proportion to its key heads.
        groups: Numbers of query heads that share a key head.
        inputs: Arguments of its ``forward`` that come with all heads, such as ``("alibi",)``: in the second
            of four dimensions, or in the first one, alone or inside each sample. Each rank takes its own.
        parameters: Its own parameters with query heads in their first dimension, which are split.
    """

    heads: int
    kv_heads: int | None = None
    query: tuple[str, ...] = ()
    shared: tuple[str, ...] = ()
    groups: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    parameters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Gathered:
    """A block that takes whole sequences, in a model that works on parts of them (arXiv:2205.05198).

    What it gets is gathered once, for all column layers in it; its row layers reduce-scatter what they make.

    Attributes:
        inputs: The arguments, given by name, that come in parts; by default the first tensor alone.
        whole: Whether its output is whole, because nothing in it is split or all of it is joined; then
            each rank takes its part of that.
        local: The numbers of its own that count heads, if there are any.
    """

    inputs: tuple[str, ...] = ()
    whole: bool = False
    local: Local | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Experts of one module whose weights are its own parameters, (experts, out, in): each is split in two.

    Every rank has its part of the hidden features of each expert; their outputs are summed.

    Attributes:
        columns: Parameters whose outputs are split: weights, and biases of shape (experts, out).
        rows: Weights whose inputs are split.
        sections: How many equal layers a column parameter fuses, each of which is split: 2 for a gate
            and an up layer behind one another, 1 where their features alternate.
        transposed: Whether weights are (experts, in, out).
        once: Parameters that are added to the sum once: biases of the row weights.
    """

    columns: tuple[str, ...] = ("gate_up_proj",)
    rows: tuple[str, ...] = ("down_proj",)
    sections: int = 2
    transposed: bool = False
    once: tuple[str, ...] = ()


Style: TypeAlias = Column | Row | Vocab | Sequence | Replicated | Local | Gathered | Experts
Plan: TypeAlias = Mapping[str, Style]
