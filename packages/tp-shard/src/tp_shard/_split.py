"""The split of a tensor into the shards that the ranks hold.

Sizes differ by at most one and the larger ones come first. Every rank can therefore compute what every other
rank holds, without communication.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from tp_core.errors import ConfigError
from tp_core.internal import split_evenly

Ranges = tuple[tuple[int, int], ...]
"""The pieces of one shard: where each begins and ends in the whole tensor."""


@dataclass(frozen=True, slots=True)
class Split:
    """The parts of one dimension of a tensor that each rank holds.

    Attributes:
        dim: The dimension of the tensor itself that is split.
        size: Its size over all shards.
        ranges: For each rank the pieces of its shard, in the order in which it holds them. Several ranks
            may hold the same piece, such as a key head that several query heads share.
    """

    dim: int
    size: int
    ranges: tuple[Ranges, ...]

    @classmethod
    def even(cls, dim: int, size: int, parts: int) -> Self:
        """Split ``size`` into ``parts`` of sizes that differ by at most one, larger ones first."""
        return cls(dim, size, tuple((bounds(size, parts, i),) for i in range(parts)))

    @property
    def parts(self) -> int:
        """The number of shards."""
        return len(self.ranges)

    @property
    def is_even(self) -> bool:
        """Return whether this is the split that :meth:`even` makes."""
        return all(r == (bounds(self.size, self.parts, i),) for i, r in enumerate(self.ranges))

    def local_size(self, rank: int) -> int:
        """Return the size of the dimension on ``rank``."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of the shard of ``rank`` of a tensor of ``shape``."""
        return (*shape[: self.dim], self.local_size(rank), *shape[self.dim + 1 :])

    def full_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole tensor, from the ``shape`` of a shard."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def take(self, full: Tensor, rank: int) -> Tensor:
        """Return the shard of ``rank`` in storage of its own, so that ``full`` can be freed."""
        pieces = [full.narrow(self.dim, a, b - a) for a, b in self.ranges[rank]]
        if len(pieces) == 1:
            return pieces[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(pieces, self.dim)

    def put(self, full: Tensor, shard: Tensor, rank: int) -> None:
        """Write the shard of ``rank`` into its place in ``full``."""
        sizes = [b - a for a, b in self.ranges[rank]]
        for (a, b), piece in zip(self.ranges[rank], torch.split(shard, sizes, self.dim), strict=True):
            full.narrow(self.dim, a, b - a).copy_(piece)


def bounds(length: int, parts: int, index: int) -> tuple[int, int]:
    """Return where shard ``index`` of ``parts`` begins and ends in a dimension of ``length``.

    Example:
        >>> [bounds(9, 2, i) for i in range(2)]
        [(0, 5), (5, 9)]
    """
    size, extra = divmod(length, parts)
    start = index * size + min(index, extra)
    return start, start + size + (index < extra)


def shard_sizes(length: int, parts: int) -> list[int]:
    """Return the sizes of all shards of a dimension of ``length``, larger ones first.

    Raises:
        ConfigError: ``parts`` is less than 1.
    """
    if parts < 1:
        msg = f"a dimension is split into 1 part or more, got {parts}"
        raise ConfigError(msg)
    return [part.stop - part.start for part in split_evenly(length, parts)]


def slice(
    tensor: Tensor, num_partitions: int, dim: int | None = None, contiguous: bool = False
) -> tuple[Tensor, ...]:
    """Split a tensor into shards of sizes that differ by at most one, larger ones first.

    Args:
        tensor: A tensor of one dimension or more.
        num_partitions: The number of shards; those beyond the size of the dimension are empty.
        dim: The dimension to split; the last one by default.
        contiguous: Whether the shards are made contiguous. They may still share the storage of
            ``tensor``.

    Returns:
        The shards, views of ``tensor``.

    Raises:
        ConfigError: The tensor has no such dimension, or ``num_partitions`` is less than 1.

    Example:
        >>> [tuple(t.shape) for t in slice(torch.empty(3, 9), 2, dim=-1)]
        [(3, 5), (3, 4)]
    """
    axis = -1 if dim is None else dim
    if not -tensor.dim() <= axis < tensor.dim():
        msg = f"cannot cut along dim {axis} of a tensor of shape {tuple(tensor.shape)}"
        raise ConfigError(msg)
    if num_partitions < 1:
        msg = f"a tensor is cut into 1 shard or more, got num_partitions={num_partitions!r}"
        raise ConfigError(msg)
    length = tensor.size(axis)
    edges = [bounds(length, num_partitions, i) for i in range(num_partitions)]
    shards = torch.split(tensor, [b - a for a, b in edges], axis)
    return tuple(s.contiguous() for s in shards) if contiguous else tuple(shards)
