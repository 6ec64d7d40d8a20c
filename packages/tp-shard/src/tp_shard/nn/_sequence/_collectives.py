"""Sequence parallelism: between the split layers each rank has a part of the sequence.

As in Korthikanti et al., "Reducing Activation Recomputation in Large Transformer Models"
(arXiv:2205.05198): what a row layer would all-reduce is reduce-scattered along the sequence, and
what a column layer takes is gathered again, so that norms and dropout work on a part each.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from tp_shard._groups import _debug
from tp_shard._groups._autograd import apply, as_output
from tp_shard._groups._collectives import copy
from tp_shard._groups._comm import all_gather
from tp_shard._groups._group import Group
from tp_shard._split import bounds, shard_sizes
from tp_shard.nn._sequence._state import SequenceState

__all__ = [
    "gather_sequence",
    "join_sequence",
    "reduce_scatter_sequence",
    "scatter_sequence",
    "sum_gradient",
]

_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def scatter_sequence(tensor: Tensor, state: SequenceState, group: Group) -> Tensor:
    """Return this rank's part of a sequence that all ranks have.

    Forward: nothing. Backward: an all-gather.
    """
    size = state.note(tensor.size(state.dim), is_split=True)
    return tensor if group.size == 1 else apply(_Scatter, tensor, state.dim, size, group)


def gather_sequence(tensor: Tensor, state: SequenceState, group: Group) -> Tensor:
    """Return the whole sequence of the ranks' parts, for a layer whose outputs are split.

    Forward: an all-gather; one more of a number, where the lengths so far are ambiguous.
    Backward: a reduce-scatter.
    """
    if group.size == 1:
        return tensor
    size = state.whole(tensor.size(state.dim), group, tensor.device)
    return apply(_Gather, tensor, state.dim, size, group)


def reduce_scatter_sequence(tensor: Tensor, state: SequenceState, group: Group) -> Tensor:
    """Return this rank's part of the sum of the ranks' sequences.

    Forward: a reduce-scatter. Backward: an all-gather.
    """
    size = state.note(tensor.size(state.dim))
    return tensor if group.size == 1 else apply(_ReduceScatter, tensor, state.dim, size, group)


def join_sequence(tensor: Tensor, state: SequenceState, group: Group) -> Tensor:
    """Return the whole sequence of the ranks' parts, for what all ranks go on with alike.

    Forward: an all-gather. Backward: nothing, each rank takes its own part of the gradient.
    """
    if group.size == 1:
        return tensor
    size = state.whole(tensor.size(state.dim), group, tensor.device)
    return apply(_GatherAlike, tensor, state.dim, size, group)


def sum_gradient(parameter: Tensor, group: Group) -> Tensor:
    """Return a parameter that all ranks have, for use on a part of the sequence.

    Forward: nothing. Backward: an all-reduce.
    """
    return copy(parameter, group=group)


def _take(tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
    start, stop = bounds(size, group.size, group.rank)
    return tensor.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)


def _sum_and_take(tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
    """Sum over the ranks and keep one part; shorter parts are padded for the journey."""
    if _debug.state.enabled:
        _debug.check("reduce_scatter", tensor, group, "the sequence")
    sizes = shard_sizes(size, group.size)
    whole = tensor.detach().movedim(dim, 0)
    sent = whole.new_zeros((group.size, max(sizes), *whole.shape[1:]))
    for place, part in zip(sent.unbind(), torch.split(whole, sizes), strict=True):
        place[: part.size(0)] = part
    mine = sent.new_empty(sent.shape[1:])
    _reduce_scatter(mine.view(-1), sent.view(-1), group=group.handle)
    return mine[: sizes[group.rank]].movedim(0, dim).contiguous()


# Each backward pass applies the counterpart, which makes them differentiable twice.


class _Scatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
        ctx.args = dim, size, group
        return _take(tensor, dim, size, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_GatherAlike, grad, *ctx.args), None, None, None


class _GatherAlike(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
        ctx.args = dim, size, group
        return all_gather(tensor, dim, shard_sizes(size, group.size), group, layer="the sequence")

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_Scatter, grad, *ctx.args), None, None, None


class _Gather(_GatherAlike):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_ReduceScatter, grad, *ctx.args), None, None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, size: int, group: Group) -> Tensor:
        ctx.args = dim, size, group
        return as_output(_sum_and_take(tensor, dim, size, group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_Gather, grad, *ctx.args), None, None, None
