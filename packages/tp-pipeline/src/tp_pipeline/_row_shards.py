"""Rows of parameters, with which the data ranks of a stage share its weights.

::

    between two batches   rank 0: rows 0-2    rank 1: rows 3-4       of a parameter with five rows
    in a batch            both have all rows, and the whole gradients of their own samples
    after it              each has its rows of the mean gradient
"""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from tp_core.jobs import BUCKET_NBYTES
from tp_core.sessions import all_gather_single, reduce_scatter_single


class RowShards:
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


def can_be_sharded(parameter: Tensor) -> bool:
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
