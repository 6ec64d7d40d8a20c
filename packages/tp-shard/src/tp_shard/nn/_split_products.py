"""Products with split weights and lookups in split tables, as autograd functions with their collectives."""

from typing import Any, NamedTuple

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
    to_change,
)
from tp_shard._groups._group import Group
from tp_shard._split import bounds
from tp_shard.errors import OutOfRangeError


class Lookup(NamedTuple):
    """The options of a lookup, as ``F.embedding`` takes them."""

    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool


def check_tokens(tokens: Tensor, num_embeddings: int) -> None:
    """Raise on the CPU if a token is not in the table."""
    # Elsewhere the lookup itself asserts it, as torch's does: reading a value would wait for an accelerator
    # and break a compiled graph, and fake tensors have no values.
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
    """Look up tokens, the same on all ranks, in a table (local rows, features) with split rows.

    Forward: an all-reduce of the output. Backward: nothing.
    Ranks hold: sharded -> replicated; gradient: replicated -> sharded.
    """
    start, stop = bounds(num_embeddings, group.size, group.rank)
    is_local = (tokens >= start) & (tokens < stop)
    padding = None
    if lookup.padding_idx is not None and start <= lookup.padding_idx < stop:
        padding = lookup.padding_idx - start
    if lookup.scale_grad_by_freq or lookup.max_norm is not None:
        # Each row that is looked up is counted and rescaled: so row 0 must not stand in for other ranks'
        # tokens.
        rows = F.embedding(tokens[is_local] - start, weight, *lookup._replace(padding_idx=padding))
        output = rows.new_zeros((*tokens.shape, weight.size(1)))
        output = output.masked_scatter(is_local.unsqueeze(-1), rows)
    elif stop == start:
        # This rank still takes part in the sum, or the others would wait; the weight stays in the graph.
        output = weight.new_zeros((*tokens.shape, weight.size(1))) + weight.sum()
    else:
        local = torch.where(is_local, tokens - start, 0)
        if tokens.device.type != "cpu" or torch.compiler.is_compiling():
            # A token of no rank stays out of range, so that the device asserts.
            is_valid = (tokens >= 0) & (tokens < num_embeddings)
            local = torch.where(is_valid, local, stop - start)
        output = F.embedding(local, weight, padding, sparse=lookup.sparse)
        output = output.masked_fill_(~is_local.unsqueeze(-1), 0)
    return reduce_(output, group, layer)


@torch.no_grad()
def renormalize_(tokens: Tensor, weight: Tensor, lookup: Lookup, group: Group, layer: Any) -> None:
    """Scale the rows of ``tokens`` to a norm of at most ``max_norm``, in a table with split features.

    Collectives: an all-reduce of one number for each distinct token; none without ``max_norm``.
    Ranks hold: partial -> replicated.
    """
    if lookup.max_norm is None:
        return
    rows = torch.unique(tokens)
    values = weight[rows]
    p = lookup.norm_type
    if _debug.state.enabled:
        _debug.check("all_reduce of norms", rows, group, layer)
    if p == float("inf"):
        norms = values.new_zeros(values.size(0))
        if values.size(1):  # torch takes no maximum of nothing
            norms = values.abs().amax(1)
        dist.all_reduce(norms, dist.ReduceOp.MAX, group=group.handle)
    else:
        norms = values.abs().pow(p).sum(1)
        dist.all_reduce(norms, group=group.handle)
        norms = norms.pow(1 / p)
    scale = torch.where(norms > lookup.max_norm, lookup.max_norm / (norms + 1e-7), 1)  # as torch does
    weight[rows] = values * scale.unsqueeze(1)


# -- Column and row products: each is one autograd function with its collective inside ------------


def column_linear(input: Tensor, weight: Tensor, bias: Tensor | None, group: Group, layer: Any) -> Tensor:
    """Apply a weight (local out, in) with split output features to an input (..., in) that all ranks have.

    Forward: nothing. Backward: an all-reduce of the input's gradient, which overlaps the computation of the
    weight's gradient.
    Ranks hold: replicated, sharded -> sharded; gradient: sharded -> replicated, sharded.
    """
    if torch.is_autocast_enabled(input.device.type):
        input, weight, bias = autocast(input, weight, bias)
    return apply(_Column, input, weight, bias, (group, layer))


def row_linear(input: Tensor, weight: Tensor, bias: Tensor | None, group: Group, layer: Any) -> Tensor:
    """Apply a weight with split input features (out, local in) to an input split as they are (..., local in).

    Forward: an all-reduce of the output. Backward: nothing.
    Ranks hold: sharded, sharded -> replicated; gradient: replicated -> sharded, sharded.
    """
    if torch.is_autocast_enabled(input.device.type):
        input, weight, bias = autocast(input, weight, bias)
    return apply(_Row, input, weight, bias, (group, layer))


def autocast(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Cast as autocast does; the backward pass runs outside of autocast and needs one type."""
    dtype = torch.get_autocast_dtype(x.device.type)

    def cast(tensor: Tensor) -> Tensor:
        if tensor.is_floating_point() and tensor.dtype != torch.float64:
            return tensor.to(dtype)
        return tensor

    if bias is not None:
        bias = cast(bias)
    return cast(x), cast(weight), bias


def _flat(tensor: Tensor) -> Tensor:
    """Reshape a tensor of one, three or more dimensions to (rows, features)."""
    if tensor.dim() == 1:
        return tensor.unsqueeze(0)
    return tensor.flatten(0, -2)


# A hot path: most of the cost of a tiny layer is Python. torch inspects each argument of a Function, so the
# group and the layer are one argument.
_Where = tuple[Group, Any]


def _keep(ctx: Any, x: Tensor, weight: Tensor, _bias: Tensor | None, where: _Where) -> None:
    ctx.save_for_backward(x, weight)
    ctx.where = where


class _Column(torch.autograd.Function):
    # Forward: nothing. Backward: an all-reduce of the input's gradient.
    # Ranks hold: replicated, sharded -> sharded; gradient: sharded -> replicated, sharded.
    keep = staticmethod(_keep)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, where: _Where) -> Tensor:
        ctx.save_for_backward(x, weight)  # as `_keep` does, without the cost of a call
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
            if torch.is_grad_enabled():  # for a second derivative: a plain collective has none
                grad_input = reduce(grad_input, group=group)
            elif torch.compiler.is_compiling():  # the compiler decides itself what overlaps
                grad_input = all_reduce_(grad_input, group, layer=layer)
            else:
                # Before the weight's gradient and waited for after it, so that the two overlap.
                work = start_all_reduce_(grad_input, group, layer=layer)
        if grad.dim() != 2:
            grad = _flat(grad)
            x = _flat(x)
        if needs[1]:
            grad_weight = grad.t().mm(x)
        if needs[2]:
            grad_bias = grad.sum(0)
        if work is not None:
            work.wait()
        return grad_input, grad_weight, grad_bias, None


class _Row(torch.autograd.Function):
    # Forward: an all-reduce of the output. Backward: nothing.
    # Ranks hold: sharded, sharded -> replicated; gradient: replicated -> sharded, sharded.
    keep = staticmethod(_keep)

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, where: _Where) -> Tensor:
        ctx.save_for_backward(x, weight)  # as `_keep` does, without the cost of a call
        ctx.where = where
        group, layer = where
        # The bias after the sum: all ranks have it, and before it would be added once per rank.
        output = all_reduce_(to_change(F.linear(x, weight)), group, layer=layer)
        if bias is not None:
            output.add_(bias)
        return as_output(output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        needs = ctx.needs_input_grad
        grad_input = grad_weight = grad_bias = None
        if torch.is_grad_enabled():  # for a second derivative, which sums those of the ranks' parts
            grad = copy(grad, group=ctx.where[0])
        if needs[0]:
            grad_input = grad.matmul(weight)
        if grad.dim() != 2:
            grad = _flat(grad)
            x = _flat(x)
        if needs[1]:
            grad_weight = grad.t().mm(x)
        if needs[2]:
            grad_bias = grad.sum(0)
        return grad_input, grad_weight, grad_bias, None
