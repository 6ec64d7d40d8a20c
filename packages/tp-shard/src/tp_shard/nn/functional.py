"""Functional forms of the parallel layers, for shards that the caller holds."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from tp_core.errors import ConfigError

from tp_shard._groups._collectives import gather, scatter
from tp_shard._groups._group import Group, GroupLike, as_group
from tp_shard._shards import PARALLEL_DIM, PARALLEL_SIZE, check_dim
from tp_shard._split import bounds
from tp_shard.nn._cross_entropy import parallel_cross_entropy, parallel_linear_cross_entropy
from tp_shard.nn._heads import parallel_attention
from tp_shard.nn._margins import parallel_margin_cross_entropy, sample_classes
from tp_shard.nn._split_products import (
    Lookup,
    check_tokens,
    column_linear,
    renormalize_,
    row_linear,
    vocabulary_embedding,
)

__all__ = [
    "parallel_attention",
    "parallel_cross_entropy",
    "parallel_embedding",
    "parallel_linear",
    "parallel_linear_cross_entropy",
    "parallel_margin_cross_entropy",
    "sample_classes",
]


def parallel_linear(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    dim: int | None = None,
    *,
    gather_output: bool = False,
    input_is_parallel: bool | None = None,
    out_features: int | None = None,
    group: GroupLike = None,
    layer: nn.Module | str | None = None,
) -> Tensor:
    """Apply a linear layer with a split weight: ``input @ weight.T + bias``.

    The column- and row-parallel products of Megatron-LM (arXiv:1909.08053, section 3).

    Collectives, for ``dim``:

    - 1 or -1, split outputs: forward none, backward an all-reduce of the input's gradient; with
      ``gather_output`` an all-gather forward.
    - 0, split inputs: forward an all-reduce of the output, backward none. A whole input is scattered: forward
      nothing, backward an all-gather.
    - A split input to a layer that takes a whole one is gathered: an all-gather forward.

    Args:
        input: The input, of shape (..., in), or (..., local in) if it is split over the ranks.
        weight: This rank's shard in torch's order: (local out, in), or (out, local in).
        bias: The bias, of shape (local out,). For split inputs of shape (out,), the same on all ranks and
            added once.
        dim: 1 or -1 for split outputs, 0 for split inputs, ``None`` for a layer that is not split.
        gather_output: Whether to join split outputs; with split inputs the output is whole anyway.
        input_is_parallel: Whether the last dimension of the input is split. By default its width decides.
        out_features: The width of the output over all ranks, for split outputs.
        group: The ranks; the current model-parallel group by default.
        layer: The module that communicates, or a name for it, for messages.

    Returns:
        A tensor of shape (..., out), or (..., local out) for split outputs.

    Raises:
        ConfigError: The input is neither as wide as the layer nor as wide as this rank's shard, or ``dim``
            is another number.
    """
    check_dim(dim)
    form = _Form(dim, gather_output, input_is_parallel, out_features)
    return linear(input, weight, bias, form, as_group(group), layer)


class _Form(NamedTuple):
    dim: int | None
    gather_output: bool
    input_is_parallel: bool | None
    out_features: int | None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    form: Any,
    group: Group,
    layer: nn.Module | str | None,
) -> Tensor:
    """Compute :func:`parallel_linear`, without its checks; ``form`` has its options, or is a layer.

    Collectives: those of :func:`parallel_linear`.
    """
    dim, gather_output, input_is_parallel = form.dim, form.gather_output, form.input_is_parallel
    out_features = form.out_features
    if group.size == 1:
        output = F.linear(x, weight, bias)
        if not dim or gather_output:
            return output
        return mark_output(output, out_features)
    width, expected = x.size(-1), weight.size(1)
    if dim == 0:
        if input_is_parallel is False or (width != expected and input_is_parallel is None):
            x = _scatter_input(x, expected, group)
            width = x.size(-1)
        if width != expected:
            raise wrong_width(x, expected, layer)
        return row_linear(x, weight, bias, group, layer)
    if input_is_parallel or (width != expected and input_is_parallel is None):
        x = _gather_input(x, expected, group)
        width = x.size(-1)
    if width != expected:
        raise wrong_width(x, expected, layer)
    if dim is None:
        return F.linear(x, weight, bias)
    output = column_linear(x, weight, bias, group, layer)
    if gather_output:
        return gather(output, -1, size=out_features, group=group)
    return mark_output(output, out_features)


def parallel_embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
    num_embeddings: int | None = None,
    dim: int | None = None,
    *,
    embedding_dim: int | None = None,
    gather_output: bool = True,
    group: GroupLike = None,
    layer: nn.Module | str | None = None,
) -> Tensor:
    """Look up tokens in a split table, as Megatron-LM splits its vocabulary (arXiv:1909.08053).

    Collectives, for ``dim``: 0, split rows: forward an all-reduce of the output, backward none. 1 or -1,
    split features: forward an all-gather, or none without ``gather_output``, backward none. ``max_norm``
    costs an all-reduce of one number for each distinct token.

    Args:
        input: Tokens, integers of any shape (...), the same on all ranks.
        weight: This rank's shard, of shape (local rows, features) or (rows, local features).
        padding_idx: The row, of the whole table, that gets no gradient.
        max_norm: The largest norm of a row; longer rows are scaled to it when they are looked up.
        norm_type: The order of that norm.
        scale_grad_by_freq: Whether to divide a row's gradient by the number of times it is looked up.
        sparse: Whether the weight's gradient is sparse.
        num_embeddings: The number of rows of the whole table. By default the ranks' shards have the same
            size.
        dim: 0 for split rows, 1 or -1 for split features, ``None`` for a table that is not split.
        embedding_dim: The number of features over all ranks.
        gather_output: Whether to join split features.
        group: The ranks; the current model-parallel group by default.
        layer: The module that communicates, or a name for it, for messages.

    Returns:
        A tensor of shape (..., features), or (..., local features).

    Raises:
        OutOfRangeError: A token is not in the table; on every rank, before anything is sent. On
            accelerators the device asserts instead, as with torch.
        ConfigError: The weight is not this rank's shard of ``num_embeddings`` rows, ``padding_idx`` is none
            of them, or ``dim`` is another number.
    """
    check_dim(dim)
    ranks = as_group(group)
    rows = weight.size(0)
    if num_embeddings is None:
        num_embeddings = rows * ranks.size if dim == 0 else rows
    elif dim == 0:
        start, stop = bounds(num_embeddings, ranks.size, ranks.rank)
        if rows != stop - start:
            msg = (
                f"rank {ranks.rank} of {ranks.size} holds {stop - start} of {num_embeddings} rows, "
                f"got a weight of shape {tuple(weight.shape)}"
            )
            raise ConfigError(msg)
    check_tokens(input, num_embeddings)
    padding_idx = padding_row(padding_idx, num_embeddings)
    lookup = Lookup(padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if dim == 0 and ranks.size > 1:
        return vocabulary_embedding(input, weight, num_embeddings, lookup, ranks, layer)
    if dim is not None and dim != 0 and ranks.size > 1:
        renormalize_(input, weight, lookup, ranks, layer)
        max_norm = None
    output = F.embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if dim in (None, 0):
        return output
    if gather_output:
        return gather(output, -1, size=embedding_dim, group=ranks)
    return mark_output(output, embedding_dim)


def padding_row(padding_idx: int | None, num_embeddings: int) -> int | None:
    """Return the padding row of a table, counted from its beginning.

    Raises:
        ConfigError: It is none of the rows.
    """
    if padding_idx is None:
        return None
    if not -num_embeddings <= padding_idx < num_embeddings:
        msg = f"padding_idx must be one of the {num_embeddings} rows, got {padding_idx}"
        raise ConfigError(msg)
    return padding_idx % num_embeddings


def mark_output(output: Tensor, size: int | None) -> Tensor:
    """Mark an output as split along its last dimension."""
    # With setattr and not `register_parallel_dim`: a hot path. The loss reads the mark, no layer does.
    if not torch.compiler.is_compiling():
        setattr(output, PARALLEL_DIM, -1)
        setattr(output, PARALLEL_SIZE, size)
    return output


def _scatter_input(x: Tensor, expected: int, group: Group) -> Tensor:
    start, stop = bounds(x.size(-1), group.size, group.rank)
    if stop - start == expected:
        return scatter(x, -1, group=group)
    return x


def _gather_input(x: Tensor, expected: int, group: Group) -> Tensor:
    start, stop = bounds(expected, group.size, group.rank)
    if x.size(-1) == stop - start:
        return gather(x, -1, size=expected, group=group)
    return x


def wrong_width(x: Tensor, expected: int, layer: nn.Module | str | None) -> ConfigError:
    """Return the error for an input of another width."""
    of_layer = "" if layer is None else f" of {layer}"
    msg = (
        f"the input{of_layer} is {x.size(-1)} wide, and this rank's weight takes {expected}; it has to be "
        "the whole input or this rank's shard of it. An output with split features is joined by "
        "gather_output=True"
    )
    return ConfigError(msg)
