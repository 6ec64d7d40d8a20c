"""Lookups in a table and products with a weight that are split over ranks, with the collectives they need."""

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tp_shard._groups import _debug
from tp_shard._groups._collectives import (
    all_reduce_,
    apply,
    as_output,
    copy,
    reduce,
    reduce_,
    start_all_reduce_,
)
from tp_shard._groups._group import Group
from tp_shard._split import bounds
from tp_shard.errors import OutOfRangeError


class Lookup:
    """How a table is looked up, as ``F.embedding`` takes it."""

    __slots__ = ("max_norm", "norm_type", "padding_idx", "scale_grad_by_freq", "sparse")

    def __init__(
        self,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
        scale_grad_by_freq: bool,
        sparse: bool,
    ) -> None:
        self.padding_idx = padding_idx
        self.max_norm = max_norm
        self.norm_type = norm_type
        self.scale_grad_by_freq = scale_grad_by_freq
        self.sparse = sparse


def check_tokens(tokens: Tensor, num_embeddings: int) -> None:
    """Make sure on the CPU that all tokens are in the table.

    On accelerators the look-up itself asserts it, as torch's does: asking here would wait for the
    device. So it does in compiled code, which asking would break in two. Fake tensors have no values.

    Raises:
        OutOfRangeError: A token is not in the table.
    """
    is_fake = hasattr(tokens, "fake_mode")
    if tokens.device.type != "cpu" or tokens.numel() == 0 or torch.compiler.is_compiling() or is_fake:
        return
    low, high = (int(t) for t in torch.aminmax(tokens))
    if low < 0 or high >= num_embeddings:
        wrong = low if low < 0 else high
        msg = f"token {wrong} is not in the table: it has {num_embeddings} rows, 0 to {num_embeddings - 1}"
        raise OutOfRangeError(msg)


def vocabulary_embedding(
    tokens: Tensor, weight: Tensor, num_embeddings: int, lookup: Lookup, group: Group, layer: Any
) -> Tensor:
    """Look tokens up in a table whose rows are split.

    Forward: an all-reduce of the output. Backward: nothing.

    Args:
        tokens: The same on all ranks; of any shape.
        weight: This rank's rows, of shape (local rows, features).
        num_embeddings: The number of rows of all ranks.
        lookup: The options; ``padding_idx`` counts in the whole table.
        group: The ranks.
        layer: Who communicates, for messages.

    Returns:
        A tensor of shape (..., features), the same on all ranks.
    """
    start, stop = bounds(num_embeddings, group.size, group.rank)
    mine = (tokens >= start) & (tokens < stop)
    padding = lookup.padding_idx
    padding = padding - start if padding is not None and start <= padding < stop else None
    if lookup.scale_grad_by_freq or lookup.max_norm is not None:
        # Rows are counted and rescaled by how they are looked up: look up no others.
        found = F.embedding(
            tokens[mine] - start,
            weight,
            padding,
            lookup.max_norm,
            lookup.norm_type,
            lookup.scale_grad_by_freq,
            lookup.sparse,
        )
        output = found.new_zeros((*tokens.shape, weight.size(1)))
        output = output.masked_scatter(mine.unsqueeze(-1), found)
    elif stop == start:
        # Nothing to look up, but still part of the sum; the gradient is that of an empty table.
        output = weight.new_zeros((*tokens.shape, weight.size(1))) + weight.sum()
    else:
        local = torch.where(mine, tokens - start, 0)
        if tokens.device.type != "cpu" or torch.compiler.is_compiling():
            # What is in no table at all stays out of range, for the device to assert.
            known = (tokens >= 0) & (tokens < num_embeddings)
            local = torch.where(known, local, stop - start)
        output = F.embedding(local, weight, padding, sparse=lookup.sparse)
        output = output.masked_fill_(~mine.unsqueeze(-1), 0)
    return reduce_(output, group, layer)


@torch.no_grad()
def renormalize_(tokens: Tensor, weight: Tensor, lookup: Lookup, group: Group, layer: Any) -> None:
    """Scale the rows of ``tokens`` to a norm of at most ``max_norm``, where the features are split.

    Collectives: an all-reduce of one number for each different token.
    """
    if lookup.max_norm is None:
        return
    rows = torch.unique(tokens)
    values = weight[rows]
    p = lookup.norm_type
    if _debug.state.enabled:
        _debug.check("all_reduce of norms", rows, group, layer)
    if p == float("inf"):
        norms = values.abs().amax(1) if values.size(1) else values.new_zeros(values.size(0))
        dist.all_reduce(norms, dist.ReduceOp.MAX, group=group.handle)
    else:
        norms = values.abs().pow(p).sum(1)
        dist.all_reduce(norms, group=group.handle)
        norms = norms.pow(1 / p)
    scale = torch.where(norms > lookup.max_norm, lookup.max_norm / (norms + 1e-7), 1)  # as torch does
    weight[rows] = values * scale.unsqueeze(1)


# -- The two products with a split weight, each one autograd function with its collective inside


def column_linear(input: Tensor, weight: Tensor, bias: Tensor | None, group: Group, layer: Any) -> Tensor:
    """Apply a weight whose output features are split to an input that all ranks have.

    Forward: nothing. Backward: an all-reduce of the input's gradient, which runs while the
    weight's gradient is computed.

    Args:
        input: Of shape (..., in).
        weight: Of shape (local out, in).
        bias: Of shape (local out,).
        group: The ranks.
        layer: Who communicates, for messages.

    Returns:
        A tensor of shape (..., local out).
    """
    if torch.is_autocast_enabled(input.device.type):
        input, weight, bias = autocast(input, weight, bias)
    return apply(_Column, input, weight, bias, (group, layer))


def row_linear(input: Tensor, weight: Tensor, bias: Tensor | None, group: Group, layer: Any) -> Tensor:
    """Apply a weight whose input features are split to an input that is split alike.

    Forward: an all-reduce of the output. Backward: nothing.

    Args:
        input: Of shape (..., local in).
        weight: Of shape (out, local in).
        bias: Of shape (out,), the same on all ranks; added once.
        group: The ranks.
        layer: Who communicates, for messages.

    Returns:
        A tensor of shape (..., out), the same on all ranks.
    """
    if torch.is_autocast_enabled(input.device.type):
        input, weight, bias = autocast(input, weight, bias)
    return apply(_Row, input, weight, bias, (group, layer))


def autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as autocast would; the backward pass runs outside of it and must find one type."""
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(tensor: Tensor) -> Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != torch.float64 else tensor

    return cast(x), cast(weight), None if bias is None else cast(bias)


def _flat(tensor: Tensor) -> Tensor:
    """Return a tensor of other than two dimensions as (rows, features)."""
    return tensor.unsqueeze(0) if tensor.dim() == 1 else tensor.flatten(0, -2)


# The order of what follows is that of a hot path: what a tiny layer costs is mostly Python. torch looks at
# each argument of a function by itself, so that the group and the layer are one.
_Where = tuple[Group, Any]


def _keep(ctx: Any, x: Tensor, weight: Tensor, _bias: Tensor | None, where: _Where) -> None:
    ctx.save_for_backward(x, weight)
    ctx.where = where


class _Column(torch.autograd.Function):
    keep = staticmethod(_keep)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, where: _Where) -> Tensor:
        ctx.save_for_backward(x, weight)  # as keep does
        ctx.where = where
        return F.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        group, layer = ctx.where
        grad_input = grad_weight = grad_bias = work = None
        if needs[0]:
            grad_input = grad.matmul(weight)
            if torch.is_grad_enabled():  # a second derivative will be asked for
                grad_input = reduce(grad_input, group=group)
            elif torch.compiler.is_compiling():  # what overlaps is the compiler's to say
                grad_input = all_reduce_(grad_input, group, layer=layer)
            else:
                work = start_all_reduce_(grad_input, group, layer=layer)
        if grad.dim() != 2:
            grad, x = _flat(grad), _flat(x)
        if needs[1]:
            grad_weight = grad.t().mm(x)
        if needs[2]:
            grad_bias = grad.sum(0)
        if work is not None:
            work.wait()
        return grad_input, grad_weight, grad_bias, None


class _Row(torch.autograd.Function):
    keep = staticmethod(_keep)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, where: _Where) -> Tensor:
        ctx.save_for_backward(x, weight)  # as keep does
        ctx.where = where
        group, layer = where
        output = all_reduce_(F.linear(x, weight), group, layer=layer)
        return as_output(output if bias is None else output.add_(bias))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        if torch.is_grad_enabled():  # a second derivative will be asked for
            grad = copy(grad, group=ctx.where[0])
        if needs[0]:
            grad_input = grad.matmul(weight)
        if grad.dim() != 2:
            grad, x = _flat(grad), _flat(x)
        if needs[1]:
            grad_weight = grad.t().mm(x)
        if needs[2]:
            grad_bias = grad.sum(0)
        return grad_input, grad_weight, grad_bias, None
