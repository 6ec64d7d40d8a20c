"""Rows of parameters, with which the data ranks of a stage share its weights.

::

    between two batches   rank 0: rows 0-2    rank 1: rows 3-4       of a parameter with five rows
    in a batch            both have all rows, and the whole gradients of their own samples
    after it              each has its rows of the mean gradient
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import ProcessGroup
from tp_core.jobs import BUCKET_NBYTES
from tp_core.plugins import Session
from tp_core.sessions import all_gather_single, reduce_scatter_single
from tp_core.tensors import TensorSlice


class Rows:
    """The rows of each parameter that a rank of a group has: equal numbers, fewer or none at the end.

    Args:
        group: The ranks that share the parameters.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self._group = group
        self._rank, self.size = dist.get_rank(group), dist.get_world_size(group)

    def own(self, count: int) -> slice:
        """Return which of ``count`` rows this rank has."""
        each = -(-count // self.size)
        return slice(min(count, self._rank * each), min(count, (self._rank + 1) * each))

    @torch.no_grad()
    def gather(self, rows: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Return whole tensors for this rank's rows of them.

        Collective: an all-gather for each bucket.
        """
        whole: list[Tensor] = []
        for first, end in buckets(shapes, [t.dtype for t in rows]):
            part = shapes[first:end]
            pieces = [self._padded(t, s, self._each(s)) for t, s in zip(rows[first:end], part, strict=True)]
            sent = torch.cat(pieces)
            found = sent.new_empty(self.size, sent.numel())
            all_gather_single(found.view(-1), sent, group=self._group)
            of_each = found.split([p.numel() for p in pieces], dim=1)
            for piece, shape in zip(of_each, part, strict=True):
                # (ranks, elements of a rank) -> (rows with padding, ...), of which the first ones are whole
                padded = piece.reshape(-1, *shape[1:])
                whole.append(padded if len(padded) == shape[0] else padded[: shape[0]].clone())
        return whole

    @torch.no_grad()
    def mean(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's rows of the means of tensors over the ranks.

        Collective: a reduce-scatter for each bucket.
        """
        rows: list[Tensor] = []
        for first, end in buckets([t.shape for t in whole], [t.dtype for t in whole]):
            pieces = [
                self._padded(t, t.shape, self.size * self._each(t.shape)).view(self.size, -1)
                for t in whole[first:end]
            ]
            sent = torch.cat(pieces, dim=1)
            found = sent.new_empty(sent.size(1))
            reduce_scatter_single(found, sent.view(-1), group=self._group)
            found.div_(self.size)
            of_each = found.split([p.size(1) for p in pieces])
            for piece, tensor in zip(of_each, whole[first:end], strict=True):
                own = self.own(len(tensor))
                rows.append(piece.view(-1, *tensor.shape[1:])[: own.stop - own.start].clone())
        return rows

    def _each(self, shape: torch.Size) -> int:
        return -(-shape[0] // self.size)

    def _padded(self, tensor: Tensor, shape: torch.Size, rows: int) -> Tensor:
        """Return the elements of a tensor with as many rows as ranks exchange."""
        if len(tensor) == rows:
            return tensor.reshape(-1)
        padded = tensor.new_zeros(rows, *shape[1:])
        padded[: len(tensor)] = tensor
        return padded.view(-1)


class Pieces:
    """Where ranks have pieces of parameters that another session has split.

    ::

        rank 0: columns 0-3    rank 1: columns 4-7        of a matrix with 8 columns

    Attributes:
        of_ranks: For each split parameter, by identity, the pieces of each rank: where each begins in the
            whole, and its shape.
        shapes: The whole shapes of these parameters, by identity.
    """

    def __init__(self) -> None:
        self.of_ranks: dict[int, list[list[tuple[tuple[int, ...], torch.Size]]]] = {}
        self.shapes: dict[int, torch.Size] = {}
        self._session: Session | None = None

    @classmethod
    def of(cls, model: nn.Module, session: Session, group: ProcessGroup) -> "Pieces":
        """Return those of a model.

        Args:
            model: The model, prepared by the session that has split it.
            session: That session.
            group: The ranks that hold the model together.

        Collective: an all-gather of the places of pieces.
        """
        found = cls()
        found._session = session
        parameters = list(model.parameters())
        slices = [session.as_slice(p, p.data) for p in parameters]
        mine = [
            [(tuple(start), part.shape) for start, part in one.parts] if isinstance(one, TensorSlice) else []
            for one in slices
        ]
        everyones: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(everyones, mine, group=group)
        for number, (parameter, one) in enumerate(zip(parameters, slices, strict=True)):
            if isinstance(one, TensorSlice):
                found.shapes[id(parameter)] = torch.Size(one.shape)
                found.of_ranks[id(parameter)] = [theirs[number] for theirs in everyones]
        return found

    def whole(self, parameter: Tensor, shape: torch.Size) -> torch.Size:
        """Return the whole shape of a parameter, which is its own ``shape`` if it is not split."""
        return self.shapes.get(id(parameter), shape)

    def whole_later(self, parameter: Tensor, group: ProcessGroup, places: list[int], owner: int) -> Tensor:
        """Return a tensor without memory that `tp_core.state.whole` can put together.

        Args:
            parameter: The parameter, which may be empty on ranks of other places.
            group: The ranks that hold the model together.
            places: The place of each of them in its pipeline.
            owner: The place in the pipeline from which pieces are sent.
        """
        later = torch.empty(self.shapes[id(parameter)], dtype=parameter.dtype, device="meta")
        senders = [rank for rank, place in enumerate(places) if place == owner]
        later.full_tensor = partial(self._gather, parameter, group, senders)  # type: ignore[attr-defined]
        return later

    @torch.no_grad()
    def _gather(self, parameter: Tensor, group: ProcessGroup, senders: list[int]) -> Tensor:
        """Return the whole of a parameter.

        Collectives: a broadcast of each piece.
        """
        me = dist.get_rank(group)
        whole = parameter.new_empty(self.shapes[id(parameter)])
        own = dict(self._parts(parameter, parameter.data)) if me in senders else {}
        for rank in senders:
            for start, shape in self.of_ranks[id(parameter)][rank]:
                piece = own[start].contiguous() if rank == me else parameter.new_empty(shape)
                dist.broadcast(piece, group_src=rank, group=group)
                whole[_region(start, shape)] = piece
        return whole

    def cut(self, whole: Tensor, parameter: Tensor) -> Tensor:
        """Return what a rank has of a whole tensor, in place of what it has of its parameter."""
        own = whole.new_empty(parameter.shape)
        if whole.shape != self.shapes[id(parameter)]:
            return whole  # torch says so
        for start, part in self._parts(parameter, own) if own.numel() else ():
            part.copy_(whole[_region(start, part.shape)])
        return own

    def _parts(self, parameter: Tensor, value: Tensor) -> list[tuple[tuple[int, ...], Tensor]]:
        """Return views of a value of a parameter's shape, and where each begins in the whole."""
        one = self._session.as_slice(parameter, value) if self._session is not None else value
        return [(tuple(start), part) for start, part in one.parts] if isinstance(one, TensorSlice) else []


def _region(start: Sequence[int], shape: Sequence[int]) -> tuple[slice, ...]:
    return tuple(slice(first, first + size) for first, size in zip(start, shape, strict=True))


def can_be_shared(parameter: Tensor) -> bool:
    """Return whether a parameter has rows; a scalar is on each rank."""
    return parameter.dim() > 0 and parameter.numel() > 0


def buckets(shapes: Sequence[torch.Size], types: Sequence[torch.dtype]) -> Iterator[tuple[int, int]]:
    """Yield where each run of tensors of a type begins and ends, of a bucket's size or one tensor.

    Example:
        >>> rows, types = [torch.Size([2**20])] * 9, [torch.float32] * 8 + [torch.float64]
        >>> list(buckets(rows, types))
        [(0, 6), (6, 8), (8, 9)]
    """
    first = held = 0
    for number, (shape, dtype) in enumerate(zip(shapes, types, strict=True)):
        nbytes = shape.numel() * dtype.itemsize
        if number > first and (dtype != types[first] or held + nbytes > BUCKET_NBYTES):
            yield first, number
            first, held = number, 0
        held += nbytes
    if shapes:
        yield first, len(shapes)
