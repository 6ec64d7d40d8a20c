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
        each = self._rows_of_a_rank(count)
        return slice(min(count, self._rank * each), min(count, (self._rank + 1) * each))

    @torch.no_grad()
    def gather(self, rows: Sequence[Tensor], shapes: Sequence[torch.Size]) -> list[Tensor]:
        """Return whole tensors for this rank's rows of them.

        Collective: an all-gather for each bucket.
        """
        whole: list[Tensor] = []
        for first, end in buckets(shapes, [tensor.dtype for tensor in rows]):
            sent = []
            for tensor, shape in zip(rows[first:end], shapes[first:end], strict=True):
                sent.append(_flat_with_rows(tensor, self._rows_of_a_rank(shape[0])))
            bucket = torch.cat(sent)
            gathered = bucket.new_empty(self.size, bucket.numel())
            all_gather_single(gathered.view(-1), bucket, group=self._group)
            of_tensors = gathered.split([flat.numel() for flat in sent], dim=1)
            for of_ranks, shape in zip(of_tensors, shapes[first:end], strict=True):
                # (ranks, elements of a rank) -> (rows with padding, ...), of which the first ones are whole
                padded = of_ranks.reshape(-1, *shape[1:])
                if len(padded) != shape[0]:
                    padded = padded[: shape[0]].clone()
                whole.append(padded)
        return whole

    @torch.no_grad()
    def mean(self, whole: Sequence[Tensor]) -> list[Tensor]:
        """Return this rank's rows of the means of tensors over the ranks.

        Collective: a reduce-scatter for each bucket.
        """
        rows: list[Tensor] = []
        for first, end in buckets([t.shape for t in whole], [t.dtype for t in whole]):
            sent = []
            for tensor in whole[first:end]:
                flat = _flat_with_rows(tensor, self.size * self._rows_of_a_rank(len(tensor)))
                sent.append(flat.view(self.size, -1))
            bucket = torch.cat(sent, dim=1)
            own_sum = bucket.new_empty(bucket.size(1))
            reduce_scatter_single(own_sum, bucket.view(-1), group=self._group)
            own_mean = own_sum.div_(self.size)
            of_tensors = own_mean.split([flat.size(1) for flat in sent])
            for flat, tensor in zip(of_tensors, whole[first:end], strict=True):
                own = self.own(len(tensor))
                rows.append(flat.view(-1, *tensor.shape[1:])[: own.stop - own.start].clone())
        return rows

    def _rows_of_a_rank(self, count: int) -> int:
        return -(-count // self.size)


def _flat_with_rows(tensor: Tensor, rows: int) -> Tensor:
    """Return the elements of a tensor, padded to as many rows as ranks exchange."""
    if len(tensor) == rows:
        return tensor.reshape(-1)
    padded = tensor.new_zeros(rows, *tensor.shape[1:])
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
    first = size = 0
    for number, (shape, dtype) in enumerate(zip(shapes, types, strict=True)):
        nbytes = shape.numel() * dtype.itemsize
        if number > first and (dtype != types[first] or size + nbytes > BUCKET_NBYTES):
            yield first, number
            first, size = number, 0
        size += nbytes
    if shapes:
        yield first, len(shapes)
