"""Initial values of shards, equal to those of the whole tensor from the same seed."""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from tp_shard._groups import _debug
from tp_shard._groups._group import ALONE, Group, current_data_group
from tp_shard._groups._random import get_state, set_state
from tp_shard._split import Split

# -- Recording and replay of an initialization method ---------------------------------------------
# An element-wise method needs no whole tensor. Its values are drawn in blocks, in the order in which the
# whole tensor would have been filled, and a shard keeps its own. So the values, and the generator's state
# afterwards, equal those of the whole tensor.


_BLOCK = 1 << 20
"""The number of elements drawn at once; a multiple of 16, the group in which torch fills normal values."""

_aten = torch.ops.aten
# The CPU draws these element by element, in order. Others (exponential_, bernoulli_) may pass the whole
# tensor to a library with an order of its own, so drawing them in blocks would give other values.
_DRAWS = {_aten.uniform_, _aten.normal_}
_NAMES = """
abs_ add_ clamp_ clamp_max_ clamp_min_ div_ erf_ erfinv_ exp_ fill_ log_ mul_ neg_ pow_ sqrt_ sub_ tanh_ zero_
"""
_POINTWISE = {getattr(_aten, name) for name in _NAMES.split()}


class _Operation(NamedTuple):
    """One step of a method: an in-place operation, and its arguments after the tensor."""

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class _NotElementwiseError(Exception):
    """An operation that depends on more than one element."""


class _Probe(torch.Tensor):
    """A tensor without values that records the operations on it.

    It is not on the meta device: some methods check for that device and do nothing.
    """

    operations: list[_Operation]
    # Private, and what torch's own wrapper subclasses do: without it each result would be wrapped again.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own do

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares another one than it calls
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        probe, *rest = args
        is_known = func.overloadpacket in _DRAWS | _POINTWISE
        if not is_known or any(isinstance(a, Tensor) for a in [*rest, *kwargs.values()]):
            raise _NotElementwiseError
        probe.operations.append(_Operation(func, tuple(rest), kwargs))
        return probe


def _record(
    method: Callable[..., Any], shape: tuple[int, ...], like: Tensor, kwargs: dict[str, Any]
) -> list[_Operation] | None:
    """Return the operations of ``method`` on a tensor of ``shape``, ``None`` if it needs the whole tensor.

    It draws nothing.
    """
    # An accelerator's generator fills a block with other values than the same part of a larger tensor.
    if like.device.type != "cpu":
        return None
    probe = torch.Tensor._make_wrapper_subclass(_Probe, shape, dtype=like.dtype, device=like.device)
    probe.operations = []
    generator = kwargs.get("generator") or torch.default_generator
    before = generator.get_state()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the call on the real tensor warns
        try:
            method(probe, **kwargs)
        except Exception:  # noqa: BLE001 - the method needs values, and the probe has none
            probe.operations.clear()
    if not torch.equal(generator.get_state(), before):
        generator.set_state(before)
        return None  # the method itself draws in between, and a replay would lose that order
    return probe.operations or None


@torch.no_grad()
def _replay(operations: list[_Operation], shard: Tensor, split: Split | None, rank: int) -> None:
    """Apply the recorded operations to a contiguous shard."""
    for operation in operations:
        if operation.function.overloadpacket in _DRAWS and split is not None:
            _draw(operation, shard, split, rank)
        else:
            operation.function(shard, *operation.args, **operation.kwargs)


def _draw(operation: _Operation, shard: Tensor, split: Split, rank: int) -> None:
    """Fill a shard with the values that the whole tensor would get there, block by block."""
    shape = split.full_shape(tuple(shard.shape))
    inner = math.prod(shape[split.dim + 1 :])
    row = shape[split.dim] * inner  # elements of the whole tensor per index before the split dimension
    total = math.prod(shape)
    local = shard.view(math.prod(shape[: split.dim]), split.local_size(rank) * inner)
    buffer = shard.new_empty(min(total, 2 * _BLOCK))
    for begin, end in _blocks(total):
        block = buffer[: end - begin]
        operation.function(block, *operation.args, **operation.kwargs)
        _keep(block, begin, local, row, [(a * inner, b * inner) for a, b in split.ranges[rank]])


def _blocks(total: int) -> Iterator[tuple[int, int]]:
    """Split ``total`` into blocks, with a long last one: torch draws the end of a short one differently."""
    begin = 0
    while total - begin >= 2 * _BLOCK:
        yield begin, begin + _BLOCK
        begin += _BLOCK
    if total > begin:
        yield begin, total


def _keep(block: Tensor, begin: int, local: Tensor, row: int, columns: list[tuple[int, int]]) -> None:
    """Copy the shard's own elements out of a block of the whole tensor.

    The whole tensor is read as rows of ``row`` elements; the shard has the ``columns`` of each.
    """
    end = begin + block.numel()
    position = begin
    while position < end:
        index, offset = divmod(position, row)
        if offset == 0 and end - position >= row:  # all whole rows of the block at once
            count = (end - position) // row
            rows = block[position - begin : position - begin + count * row].view(count, row)
            _copy_columns(rows, 0, local[index : index + count], columns)
            position += count * row
        else:
            length = min(row - offset, end - position)
            piece = block[position - begin : position - begin + length].view(1, length)
            _copy_columns(piece, offset, local[index : index + 1], columns)
            position += length


def _copy_columns(rows: Tensor, offset: int, local: Tensor, columns: list[tuple[int, int]]) -> None:
    """Copy the ``columns`` out of rows that begin at column ``offset``."""
    at = 0
    for a, b in columns:
        first, last = max(a, offset), min(b, offset + rows.size(1))
        if first < last:
            target = local[:, at + first - a : at + last - a]
            target.copy_(rows[:, first - offset : last - offset])
        at += b - a


# -- Initialization of shards ---------------------------------------------------------------------


def init_shard_(
    init_method: Callable[..., Any],
    tensor: Tensor,
    split: Split | None,
    group: Group,
    kwargs: dict[str, Any],
) -> None:
    """Initialize a shard with the values that the whole tensor would have had from the same seed.

    The generator of the group's first rank counts, whatever the others were seeded with. Ranks of the same
    seed stay in step.

    An element-wise method draws in blocks, and no rank holds the whole tensor: uniform, normal, constant,
    Xavier's and Kaiming's, and custom methods that consist of them. Other methods, and any method on an
    accelerator, make the whole tensor on each rank for a moment: orthogonal, sparse, eye, dirac, and
    trunc_normal, which torch draws until all elements are within the bounds.

    Args:
        init_method: A method of ``torch.nn.init``, or any function that fills a tensor in place.
        tensor: The shard. Its type is kept. On the meta device nothing happens.
        split: Its split; ``None`` for a tensor that is whole on all ranks, and gets the same values there.
        group: The ranks that hold the tensor together.
        kwargs: Further arguments of ``init_method``.

    Collectives: two broadcasts of a generator's state.
    """
    if tensor.is_meta:
        return
    generator = kwargs.get("generator")
    with same_generator(group, tensor.device, generator), torch.no_grad():
        if split is None or group.size == 1:
            init_method(tensor, **kwargs)
            return
        shape = split.full_shape(tuple(tensor.shape))
        operations = _record(init_method, shape, tensor, kwargs)
        target = tensor.data
        if operations is not None and target.is_contiguous():
            _replay(operations, target, split, group.rank)
            return
        whole = torch.empty(shape, dtype=tensor.dtype, device=tensor.device)
        init_method(whole, **kwargs)
        target.copy_(split.take(whole, group.rank))


@contextmanager
def same_generator(group: Group, device: torch.device, generator: torch.Generator | None) -> Iterator[None]:
    """Set the generator to the state of the first rank: of the data-parallel group, then of ``group``.

    A rank with another state gets its own back afterwards. Other ranks keep the new one, in step.

    Collectives: two broadcasts of a generator's state.
    """
    data = current_data_group() or ALONE
    if group.size == 1 and data.size == 1:
        yield
        return
    state = get_state(device, generator)
    theirs = state.clone()
    # Data first: then the first rank of each copy has the state of the first copy, for the others of its
    # copy.
    for ranks in (data, group):
        if ranks.size > 1:
            theirs = _broadcast(theirs, ranks, device)
    same = torch.equal(state, theirs)
    if not same:
        set_state(theirs, device, generator)
    try:
        yield
    finally:
        if not same:
            set_state(state, device, generator)


def _broadcast(state: Tensor, group: Group, device: torch.device) -> Tensor:
    # Ranks hold: varying -> replicated.
    if _debug.state.enabled:
        _debug.check("broadcast of a generator's state", state, group, None)
    moved = state.to(device)  # NCCL cannot send from the CPU
    dist.broadcast(moved, group_src=0, group=group.handle)
    return moved.to(state.device)
