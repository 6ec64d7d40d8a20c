"""What an initialization method does to a tensor, written down and done again to a shard of it.

Methods that treat each element alike need no whole tensor: what they draw is drawn in blocks, in
the order in which the whole tensor would have been filled, and a shard keeps its own. So the values
and the generator's state afterwards are those of the whole tensor.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tp_shard._split import Split

__all__ = ["BLOCK", "Operation", "record", "replay"]

BLOCK = 1 << 20
"""Elements that are drawn at once; a multiple of 16, by which torch fills normal values."""

_aten = torch.ops.aten
# Drawn element by element, in order, on the CPU. Others (exponential_, bernoulli_) may hand the
# whole tensor to a library that draws in an order of its own.
_DRAWS = {_aten.uniform_.default, _aten.normal_.default}
_POINTWISE = {
    _aten.abs_.default,
    _aten.add_.Scalar,
    _aten.add_.Tensor,
    _aten.clamp_.default,
    _aten.clamp_max_.default,
    _aten.clamp_min_.default,
    _aten.div_.Scalar,
    _aten.div_.Tensor,
    _aten.erf_.default,
    _aten.erfinv_.default,
    _aten.exp_.default,
    _aten.fill_.Scalar,
    _aten.log_.default,
    _aten.mul_.Scalar,
    _aten.mul_.Tensor,
    _aten.neg_.default,
    _aten.pow_.Scalar,
    _aten.sqrt_.default,
    _aten.sub_.Scalar,
    _aten.sub_.Tensor,
    _aten.tanh_.default,
    _aten.zero_.default,
}


@dataclass(frozen=True, slots=True)
class Operation:
    """One step of a method: an operation in place, and what it takes beside the tensor."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    @property
    def draws(self) -> bool:
        """Return whether it takes values from a generator."""
        return self.function in _DRAWS


class _NotElementwiseError(Exception):
    """The method does something that depends on more than one element."""


class _Probe(torch.Tensor):
    """A tensor without values that writes down what is done to it.

    Not one of the meta device: some methods see that one coming and do nothing.
    """

    operations: list[Operation]
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]  # as torch's own do

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch declares another one than it calls
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        probe, *rest = args
        known = func in _DRAWS or func in _POINTWISE
        if not known or any(isinstance(a, Tensor) for a in [*rest, *kwargs.values()]):
            raise _NotElementwiseError
        probe.operations.append(Operation(func, tuple(rest), kwargs))
        return probe


def record(
    method: Callable[..., Any], shape: tuple[int, ...], like: Tensor, kwargs: dict[str, Any]
) -> list[Operation] | None:
    """Return what ``method`` does to a tensor of ``shape``, ``None`` if it needs the whole tensor.

    Nothing is drawn. An accelerator's generator fills a block otherwise than a part of a whole:
    there every method needs the whole tensor.
    """
    if like.device.type != "cpu":
        return None
    probe = torch.Tensor._make_wrapper_subclass(_Probe, shape, dtype=like.dtype, device=like.device)
    probe.operations = []
    generator = kwargs.get("generator") or torch.default_generator
    before = generator.get_state()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # the method itself warns if it is called again
        try:
            method(probe, **kwargs)
        except Exception:  # noqa: BLE001 - whatever it needs, a tensor without values did not have it
            probe.operations.clear()
    if not torch.equal(generator.get_state(), before):
        generator.set_state(before)
        return None  # it draws for itself too, in between: that order has to be kept
    return probe.operations or None


@torch.no_grad()
def replay(operations: list[Operation], shard: Tensor, split: Split | None, rank: int) -> None:
    """Do to a contiguous shard what was recorded of the whole tensor."""
    for operation in operations:
        if operation.draws and split is not None:
            _draw(operation, shard, split, rank)
        else:
            operation.function(shard, *operation.args, **operation.kwargs)


def _draw(operation: Operation, shard: Tensor, split: Split, rank: int) -> None:
    """Fill a shard with what the whole tensor would get there, block by block."""
    shape = split.full_shape(tuple(shard.shape))
    inner = math.prod(shape[split.dim + 1 :])
    row = shape[split.dim] * inner  # elements of the whole for each index before the cut dimension
    total = math.prod(shape)
    local = shard.view(math.prod(shape[: split.dim]), split.local_size(rank) * inner)
    buffer = shard.new_empty(min(total, 2 * BLOCK))
    for begin, end in _blocks(total):
        block = buffer[: end - begin]
        operation.function(block, *operation.args, **operation.kwargs)
        _keep(block, begin, local, row, [(a * inner, b * inner) for a, b in split.ranges[rank]])


def _blocks(total: int) -> Iterator[tuple[int, int]]:
    """Cut ``total`` into blocks, the last one of which is not short: torch ends short ones apart."""
    begin = 0
    while total - begin >= 2 * BLOCK:
        yield begin, begin + BLOCK
        begin += BLOCK
    if total > begin:
        yield begin, total


def _keep(block: Tensor, begin: int, local: Tensor, row: int, columns: list[tuple[int, int]]) -> None:
    """Copy those elements of a block of the whole into the shard that are its own.

    The whole is seen as rows of ``row`` elements, of which the shard has the ``columns``.
    """
    end = begin + block.numel()
    position = begin
    while position < end:
        index, offset = divmod(position, row)
        if offset == 0 and end - position >= row:  # as many whole rows as there are, at once
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
