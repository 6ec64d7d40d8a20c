"""Collectives over plain tensors: without gradients, and as autograd functions with a backward collective.

Each declares how ranks hold what it takes and what it gives, and then the same of the gradient::

    replicated    all ranks have the same
    sharded       each has its slice along one dimension
    partial       each has a summand, and their sum is the tensor
    varying       each has its own
"""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from tp_core.errors import ConfigError
from tp_core.sessions import all_gather_single

from tp_shard._groups import _debug
from tp_shard._groups._group import Group, GroupLike, as_group
from tp_shard._split import bounds, shard_sizes


# torch.func needs `setup_context` apart from `forward`, and with one torch inspects a signature in every
# call: more time than a tiny layer takes. So a second class has it, and is used only where a transform is
# active.
def apply(kind: Any, *inputs: Any) -> Tensor:
    """Apply an autograd function to its inputs, with a type that torch's own ``apply`` lacks.

    Args:
        kind: A ``torch.autograd.Function``. torch.func can differentiate it if it has a static
            ``keep(ctx, *inputs)``: its ``forward`` calls that to save inputs for the backward pass.
        *inputs: Its inputs.
    """
    # Private: nothing public says whether a transform is active. Without it a transform gets a function
    # without `setup_context` and refuses it (`torch_func_differentiates_once_and_twice`).
    if torch._C._are_functorch_transforms_active() and not torch.compiler.is_compiling():
        kind = _transformable(kind)
    output: Tensor = kind.apply(*inputs)
    return output


def as_output(result: Tensor) -> Tensor:
    """Return the result of an in-place operation in a form that a compiled forward pass may return.

    In compiled code torch 2.11 silently returns a zero gradient for such a result (`add_`, an all-reduce, a
    `.to()` or `.contiguous()` without effect). A view keeps the gradient and costs nothing there.
    """
    if torch.compiler.is_dynamo_compiling():
        return result.view_as(result)
    return result


def to_change(tensor: Tensor) -> Tensor:
    """Return an operator's result in a form that may be changed in place.

    That is a copy where a mode sees what operators return: a selective checkpoint keeps it.
    """
    if torch.compiler.is_compiling() or not torch._C._len_torch_dispatch_stack():
        return tensor
    return tensor.clone()


class _NoContext:
    """A context that ignores what ``forward`` saves; ``setup_context`` saves it in the transform's own."""

    def save_for_backward(self, *_: Any) -> None:
        pass

    mark_dirty = save_for_backward


@functools.cache
def _transformable(kind: Any) -> Any:
    if not hasattr(kind, "keep"):
        return kind  # torch's own error then says that it cannot be transformed

    def forward(*inputs: Any) -> Any:
        return kind.forward(_NoContext(), *inputs)

    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001 - torch's contract
        kind.keep(ctx, *inputs)

    methods = {"forward": forward, "setup_context": setup_context, "backward": kind.backward}
    static = {name: staticmethod(method) for name, method in methods.items()}
    return type(kind.__name__, (torch.autograd.Function,), static)


# -- Collectives on plain tensors, without gradients ----------------------------------------------


def all_gather_flat(output: Tensor, local: Tensor, group: Group) -> None:
    """Fill a contiguous ``output`` with the ranks' tensors, contiguous and of one shape, one after the other.

    Collectives: one all-gather.
    Ranks hold: sharded -> replicated.
    """
    # Both flat, because gloo wants the gathered tensor to have as many dimensions as the single one.
    all_gather_single(output.view(-1), local.view(-1), group=group.handle)


def all_reduce_(tensor: Tensor, group: Group, *, layer: Any = None) -> Tensor:
    """Sum a contiguous tensor over the ranks, in place, and return it.

    The caller owns the tensor: nobody else may hold it.

    Collectives: one all-reduce.
    Ranks hold: partial -> replicated.
    """
    if _debug.state.enabled:
        _debug.check("all_reduce", tensor, group, layer)
    dist.all_reduce(tensor, group=group.handle)
    return tensor


def start_all_reduce_(tensor: Tensor, group: Group, *, layer: Any) -> dist.Work:
    """Start to sum a contiguous tensor over the ranks, in place; call ``wait()`` before you read it.

    Collectives: one asynchronous all-reduce.
    Ranks hold: partial -> replicated.
    """
    if _debug.state.enabled:
        _debug.check("all_reduce", tensor, group, layer)
    work: dist.Work = dist.all_reduce(tensor, group=group.handle, async_op=True)
    return work


def gather_sizes(size: int, group: Group, device: torch.device) -> list[int]:
    """Return the ``size`` of each rank.

    Collectives: one all-gather of a number.
    Ranks hold: varying -> replicated.
    """
    local_size = torch.tensor([size], device=device)
    if _debug.state.enabled:
        _debug.check("all_gather of sizes", local_size, group, None)
    sizes = local_size.new_empty(group.size)
    all_gather_flat(sizes, local_size, group)
    return [int(n) for n in sizes.tolist()]


def all_gather(tensor: Tensor, dim: int, sizes: list[int], group: Group, *, layer: Any = None) -> Tensor:
    """Return the ranks' tensors joined along ``dim``; ``sizes`` are their sizes in that dimension.

    Collectives: one all-gather, of shards padded to the longest.
    Ranks hold: sharded -> replicated.
    """
    dim %= tensor.dim()
    # Before anything is sent: the collective itself would mix the bytes of tensors of different sizes.
    if tensor.size(dim) != sizes[group.rank]:
        msg = (
            f"rank {group.rank} of {group.size} holds {tensor.size(dim)} of {sum(sizes)} in dim {dim}, "
            f"and its shard has {sizes[group.rank]}; the shards have sizes {sizes}"
        )
        raise ConfigError(msg)
    if _debug.state.enabled:
        _debug.check("all_gather", tensor, group, layer, uneven_dim=dim)
    longest = max(sizes)
    local = tensor.detach().movedim(dim, 0)
    # An all-gather into one tensor needs the same size on all ranks; `join` cuts the padding off again.
    if local.size(0) < longest:
        padded = local.new_zeros((longest, *local.shape[1:]))
        padded[: local.size(0)] = local
        local = padded
    local = local.contiguous()
    everyones = local.new_empty((group.size, *local.shape))
    all_gather_flat(everyones, local, group)
    return join(list(everyones.unbind()), dim, sizes)


def join(parts: list[Tensor], dim: int, sizes: list[int]) -> Tensor:
    """Join gathered parts along ``dim``; in each of them the split dimension comes first and is padded."""
    trimmed = [part[:size].movedim(0, dim) for part, size in zip(parts, sizes, strict=True)]
    return torch.cat(trimmed, dim)


# -- Differentiable collectives on plain tensors --------------------------------------------------
# None of them writes into its argument or into an incoming gradient: autograd or the user may still hold it.
# (`copy_sums_the_gradient_and_leaves_the_other_branch_of_a_residual_alone`)


def copy(tensor: Tensor, *, group: GroupLike = None) -> Tensor:
    """Pass a tensor that all ranks have to each rank's own shard of a layer.

    Forward: nothing. Backward: an all-reduce of the gradient. Megatron-LM's "f" (arXiv:1909.08053).
    Ranks hold: replicated -> replicated; gradient: partial -> replicated.

    Args:
        tensor: The same tensor on all ranks, of any shape.
        group: The ranks; the current model-parallel group by default.

    Returns:
        The tensor, as a view of the same shape.
    """
    ranks = as_group(group)
    if ranks.size == 1:
        return tensor
    return apply(_Copy, tensor, ranks)


def reduce(tensor: Tensor, *, group: GroupLike = None) -> Tensor:
    """Return the sum of the ranks' tensors, on all of them; the argument is not changed.

    Forward: an all-reduce. Backward: nothing, each rank has the gradient of the sum already. Megatron-LM's
    "g" (arXiv:1909.08053).
    Ranks hold: partial -> replicated; gradient: replicated -> replicated.

    Args:
        tensor: A tensor of the same shape on all ranks.
        group: The ranks; the current model-parallel group by default.

    Returns:
        A tensor of that shape.
    """
    ranks = as_group(group)
    if ranks.size == 1:
        return tensor
    return apply(_Reduce, tensor, ranks)


def scatter(tensor: Tensor, dim: int = -1, *, group: GroupLike = None) -> Tensor:
    """Return this rank's shard of a tensor that all ranks have, in storage of its own.

    Forward: nothing. Backward: an all-gather of the gradient.
    Ranks hold: replicated -> sharded; gradient: sharded -> replicated.

    Args:
        tensor: The same tensor on all ranks.
        dim: The dimension to split; sizes differ by at most one, larger ones first.
        group: The ranks; the current model-parallel group by default.

    Returns:
        A tensor of the same shape but for ``dim``, which has this rank's part of its size.

    Raises:
        ConfigError: The tensor has no such dimension.
    """
    ranks = as_group(group)
    axis = _axis(tensor, dim)
    if ranks.size == 1:
        return tensor
    return apply(_Scatter, tensor, axis, ranks)


def gather(tensor: Tensor, dim: int = -1, *, size: int | None = None, group: GroupLike = None) -> Tensor:
    """Return the ranks' shards joined along ``dim``, on all of them.

    Forward: an all-gather; without ``size`` one more, of a number. Backward: nothing, each rank takes its own
    part of the gradient. This is right where all ranks compute the same with the joined tensor. To gather a
    batch to which each rank brings its own samples, use :func:`gather_batch`.
    Ranks hold: sharded -> replicated; gradient: replicated -> sharded.

    Args:
        tensor: This rank's shard; the shards may have different sizes in ``dim``.
        dim: The dimension that is split.
        size: Its size over all shards, if they are split as :func:`scatter` does. Without it the ranks first
            exchange their sizes.
        group: The ranks; the current model-parallel group by default.

    Returns:
        A tensor of the same shape but for ``dim``, which has the sum of the shards' sizes.

    Raises:
        ConfigError: The tensor has no such dimension, or is not this rank's shard of ``size``.
    """
    ranks = as_group(group)
    axis = _axis(tensor, dim)
    if ranks.size == 1:
        return tensor
    return apply(_AllGather, tensor, axis, _sizes(tensor, axis, size, ranks), ranks, 1)


def gather_batch(tensor: Tensor, *, size: int | None = None, group: GroupLike = None) -> Tensor:
    """Return the samples of all ranks, joined along dim 0, for a head that is split over them.

    The recipe has four steps. Replicate the backbone under DistributedDataParallel, and give each rank its
    own samples. Call ``gather_batch`` on the features and on the targets. Apply a head with split outputs.
    Compute the parallel loss, a mean over the joined batch.

    DDP divides the backbone's gradient by the number of ranks, but the loss is one value and not a mean of
    several. The backward pass multiplies by that number, so the backbone gets the gradient of an unsharded
    head under DDP.

    Forward: an all-gather; without ``size`` one more, of a number. Backward: nothing, each rank takes its own
    part of the gradient, times the number of ranks.
    Ranks hold: sharded -> replicated; gradient: replicated -> sharded.

    Args:
        tensor: The samples of this rank, of shape (samples, ...); their numbers may differ.
        size: The number of samples over all ranks, if they are split as :func:`scatter` does. Without it the
            ranks first exchange their numbers.
        group: The ranks; the current model-parallel group by default.

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
    return apply(_AllGather, tensor, axis, sizes, ranks, ranks.size)


def reduce_(tensor: Tensor, group: Group, layer: Any) -> Tensor:
    """Sum a contiguous tensor over the ranks in place, where :func:`reduce` makes a new one.

    Use it for a layer's own intermediate results. Autograd marks the tensor as changed, so an operation that
    saved the old values raises in its backward pass.

    Forward: an all-reduce. Backward: nothing.
    Ranks hold: partial -> replicated; gradient: replicated -> replicated.
    """
    return apply(_ReduceInPlace, to_change(tensor), group, layer)


def _axis(tensor: Tensor, dim: int) -> int:
    if not -tensor.dim() <= dim < tensor.dim():
        msg = f"a tensor of shape {tuple(tensor.shape)} has no dim {dim}"
        raise ConfigError(msg)
    return dim % tensor.dim()


def _sizes(tensor: Tensor, dim: int, size: int | None, group: Group) -> list[int]:
    if size is None:
        return gather_sizes(tensor.size(dim), group, tensor.device)
    return shard_sizes(size, group.size)


# Each backward pass applies another autograd function and no plain collective: so all of them can be
# differentiated twice (`all_of_them_are_differentiable_twice`).


class _Copy(torch.autograd.Function):
    # Forward: nothing. Backward: an all-reduce.
    # Ranks hold: replicated -> replicated; gradient: partial -> replicated.
    @staticmethod
    def keep(ctx: Any, _tensor: Tensor, group: Group) -> None:
        ctx.group = group

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        _Copy.keep(ctx, tensor, group)
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_Reduce, grad, ctx.group), None


class _Reduce(torch.autograd.Function):
    # Forward: an all-reduce. Backward: nothing.
    # Ranks hold: partial -> replicated; gradient: replicated -> replicated.
    @staticmethod
    def keep(ctx: Any, _tensor: Tensor, group: Group) -> None:
        ctx.group = group

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group) -> Tensor:
        _Reduce.keep(ctx, tensor, group)
        return as_output(all_reduce_(tensor.clone(memory_format=torch.contiguous_format), group))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_Copy, grad, ctx.group), None


class _ReduceInPlace(torch.autograd.Function):
    # Forward: an all-reduce, in place. Backward: nothing.
    # Ranks hold: partial -> replicated; gradient: replicated -> replicated.
    @staticmethod
    def keep(ctx: Any, tensor: Tensor, group: Group, _layer: Any) -> None:
        ctx.group = group
        ctx.mark_dirty(tensor)

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, group: Group, layer: Any) -> Tensor:
        _ReduceInPlace.keep(ctx, tensor, group, layer)
        return all_reduce_(tensor, group, layer=layer)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return apply(_Copy, grad, ctx.group), None, None


class _Scatter(torch.autograd.Function):
    # Forward: nothing. Backward: an all-gather.
    # Ranks hold: replicated -> sharded; gradient: sharded -> replicated.
    @staticmethod
    def keep(ctx: Any, tensor: Tensor, dim: int, group: Group) -> None:
        ctx.dim, ctx.group, ctx.size = dim, group, tensor.size(dim)

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, group: Group) -> Tensor:
        _Scatter.keep(ctx, tensor, dim, group)
        start, stop = bounds(tensor.size(dim), group.size, group.rank)
        # A clone: a view would keep the whole tensor alive.
        return tensor.narrow(dim, start, stop - start).clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        sizes = shard_sizes(ctx.size, ctx.group.size)
        return apply(_AllGather, grad, ctx.dim, sizes, ctx.group, 1), None, None


class _AllGather(torch.autograd.Function):
    # Forward: an all-gather. Backward: nothing, this rank's part of the gradient.
    # Ranks hold: sharded -> replicated; gradient: replicated -> sharded.
    @staticmethod
    def keep(ctx: Any, _tensor: Tensor, dim: int, sizes: list[int], group: Group, factor: int) -> None:
        ctx.dim, ctx.sizes, ctx.rank, ctx.factor = dim, sizes, group.rank, factor

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, dim: int, sizes: list[int], group: Group, factor: int) -> Tensor:
        _AllGather.keep(ctx, tensor, dim, sizes, group, factor)
        return all_gather(tensor, dim, sizes, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        start = sum(ctx.sizes[: ctx.rank])
        local = grad.narrow(ctx.dim, start, ctx.sizes[ctx.rank])
        if ctx.factor != 1:
            local = local * ctx.factor
        return local, None, None, None, None
