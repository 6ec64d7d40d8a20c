"""Differentiable collectives on plain tensors.

Each names its forward and its backward collective. None writes into its argument or into a
gradient that comes in: autograd or the user may still hold it.
"""

from typing import Any

import torch
from torch import Tensor
from tp_core.errors import ConfigError

from tp_shard._groups._autograd import apply, as_output
from tp_shard._groups._comm import all_gather, all_reduce_, gather_sizes
from tp_shard._groups._group import Group, GroupLike, as_group
from tp_shard._split import bounds, shard_sizes

__all__ = ["copy", "gather", "gather_batch", "reduce", "reduce_", "scatter"]


def copy(tensor: Tensor, *, group: GroupLike = None) -> Tensor:
    """Let the ranks go on with a tensor that they all have, each into its own shard of a layer.

    Forward: nothing. Backward: an all-reduce of the gradient. Megatron-LM's "f" (arXiv:1909.08053).

    Args:
        tensor: The same tensor on all ranks, of any shape.
        group: Who; the current model-parallel group by default.

    Returns:
        The tensor, as a view of the same shape.
    """
    ranks = as_group(group)
    return tensor if ranks.size == 1 else apply(_Copy, tensor, ranks)


def reduce(tensor: Tensor, *, group: GroupLike = None) -> Tensor:
    """Return the sum of the ranks' tensors, on all of them; the argument is kept.

    Forward: an all-reduce. Backward: nothing, each rank has the gradient of the sum already. Megatron-LM's
    "g" (arXiv:1909.08053).

    Args:
        tensor: A tensor of the same shape on all ranks.
        group: Who; the current model-parallel group by default.

    Returns:
        A tensor of that shape.
    """
    ranks = as_group(group)
    return tensor if ranks.size == 1 else apply(_Reduce, tensor, ranks)


def scatter(tensor: Tensor, dim: int = -1, *, group: GroupLike = None) -> Tensor:
    """Return this rank's shard of a tensor that all ranks have, in storage of its own.

    Forward: nothing. Backward: an all-gather of the gradient.

    Args:
        tensor: The same tensor on all ranks.
        dim: The dimension to cut; sizes differ by at most one, larger ones first.
        group: Who; the current model-parallel group by default.

    Returns:
        A tensor of the same shape but for ``dim``, which has this rank's part of its size.

    Raises:
        ConfigError: The tensor has no such dimension.
    """
    ranks = as_group(group)
    axis = _axis(tensor, dim)
    return tensor if ranks.size == 1 else apply(_Scatter, tensor, axis, ranks)


def gather(tensor: Tensor, dim: int = -1, *, size: int | None = None, group: GroupLike = None) -> Tensor:
    """Return the ranks' shards joined along ``dim``, on all of them.

    Forward: an all-gather. Backward: nothing, each rank takes its own part of the gradient. That
    is right where the ranks go on alike with the joined tensor. For a batch whose samples each
    rank brought on its own, see :func:`gather_batch`.

    Args:
        tensor: This rank's shard; the shards may have different sizes in ``dim``.
        dim: The dimension that is cut.
        size: Its size over all shards, where they are those of :func:`scatter`. Without it the
            ranks first exchange their sizes.
        group: Who; the current model-parallel group by default.

    Returns:
        A tensor of the same shape but for ``dim``, which has the sum of the shards' sizes.

    Raises:
        ConfigError: The tensor has no such dimension, or is not this rank's shard of ``size``.
    """
    ranks = as_group(group)
    axis = _axis(tensor, dim)
    if ranks.size == 1:
        return tensor
    return apply(_Gather, tensor, axis, _sizes(tensor, axis, size, ranks), ranks, 1)


def gather_batch(tensor: Tensor, *, size: int | None = None, group: GroupLike = None) -> Tensor:
    """Return the samples of all ranks, joined along dim 0, for a head that is split over them.

    The recipe: a replicated backbone under DistributedDataParallel, each rank with samples of its
    own; ``gather_batch`` of the features and of the targets; a head with split outputs; the
    parallel loss, a mean over the joined batch. DDP divides the backbone's gradient by the
    number of ranks, though the loss is one and not the mean of several: here that is made up
    for, so that the backbone gets the gradient of an unsharded head under DDP.

    Forward: an all-gather. Backward: nothing, each rank takes its own part of the gradient, times
    the number of ranks.

    Args:
        tensor: The samples of this rank, of shape (samples, ...); their numbers may differ.
        size: The number of samples over all ranks, where they are split as :func:`scatter` does.
            Without it the ranks first exchange their numbers.
        group: Who; the current model-parallel group by default.

    Returns:
        A tensor of shape (samples of all ranks, ...), in the order of the ranks.

    Raises:
        ConfigError: The tensor has no dimension, or is not this rank's part of ``size``.
    """
    ranks = as_group(group)
    axis = _axis(tensor, 0)
    if ranks.size == 1:
        return tensor
    sizes = _sizes(tensor, axis, size, ranks)
    return apply(_Gather, tensor, axis, sizes, ranks, ranks.size)


def reduce_(tensor: Tensor, group: Group, layer: Any = None) -> Tensor:
    """Sum a contiguous tensor over the ranks in place, as :func:`reduce` does into a new one.

    For a layer's own intermediate results. Autograd notes the change, so that an operation which
    had saved the old values refuses to go backward.
    """
    return apply(_ReduceInPlace, tensor, group, layer)


def _axis(tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        msg = f"a tensor of shape {tuple(tensor.shape)} has no dim {dim}"
        raise ConfigError(msg)
    return dim % tensor.dim()


def _sizes(tensor: Tensor, dim: int, size: int | None, group: Group) -> list[int]:
    if size is None:
        return gather_sizes(tensor.size(dim), group, tensor.device)
    return shard_sizes(size, group.size)


# In all of them the backward pass applies the counterpart, which makes them differentiable twice.


def _keep_of_copy(ctx: Any, _tensor: Tensor, group: Group) -> None:
    ctx.group = group


class _Copy(torch.autograd.Function):
    keep = staticmethod(_keep_of_copy)

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        _keep_of_copy(ctx, tensor, group)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_Reduce, grad, ctx.group), None


def _keep_of_reduce(ctx: Any, _tensor: Tensor, group: Group) -> None:
    ctx.group = group


class _Reduce(torch.autograd.Function):
    keep = staticmethod(_keep_of_reduce)

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        _keep_of_reduce(ctx, tensor, group)
        return as_output(all_reduce_(tensor.clone(memory_format=torch.contiguous_format), group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_Copy, grad, ctx.group), None


def _keep_of_reduce_in_place(ctx: Any, tensor: Tensor, group: Group, _layer: Any) -> None:
    ctx.group = group
    ctx.mark_dirty(tensor)


class _ReduceInPlace(torch.autograd.Function):
    keep = staticmethod(_keep_of_reduce_in_place)

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, layer: Any) -> Tensor:
        _keep_of_reduce_in_place(ctx, tensor, group, layer)
        return all_reduce_(tensor, group, layer=layer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_Copy, grad, ctx.group), None, None


def _keep_of_scatter(ctx: Any, tensor: Tensor, dim: int, group: Group) -> None:
    ctx.dim, ctx.group, ctx.size = dim, group, tensor.size(dim)


class _Scatter(torch.autograd.Function):
    keep = staticmethod(_keep_of_scatter)

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: Group) -> Tensor:
        _keep_of_scatter(ctx, tensor, dim, group)
        start, stop = bounds(tensor.size(dim), group.size, group.rank)
        return tensor.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        sizes = shard_sizes(ctx.size, ctx.group.size)
        return apply(_Gather, grad, ctx.dim, sizes, ctx.group, 1), None, None


def _keep_of_gather(ctx: Any, _tensor: Tensor, dim: int, sizes: list[int], group: Group, factor: int) -> None:
    ctx.dim, ctx.sizes, ctx.rank, ctx.factor = dim, sizes, group.rank, factor


class _Gather(torch.autograd.Function):
    keep = staticmethod(_keep_of_gather)

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, sizes: list[int], group: Group, factor: int) -> Tensor:
        _keep_of_gather(ctx, tensor, dim, sizes, group, factor)
        return all_gather(tensor, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        start = sum(ctx.sizes[: ctx.rank])
        mine = grad.narrow(ctx.dim, start, ctx.sizes[ctx.rank])
        return (mine * ctx.factor if ctx.factor != 1 else mine), None, None, None, None
