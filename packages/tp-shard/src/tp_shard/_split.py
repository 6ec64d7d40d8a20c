"""The split of a tensor into the shards that the ranks hold.

Sizes differ by at most one and the larger ones come first. Every rank can therefore compute what every other
rank holds, without communication.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor
from tp_core.data import split_evenly
from tp_core.errors import ConfigError

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
        return len(self.ranges)

    @property
    def is_even(self) -> bool:
        """Return whether this is the split that :meth:`even` makes."""
        return all(r == (bounds(self.size, self.parts, i),) for i, r in enumerate(self.ranges))

    def local_size(self, rank: int) -> int:
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
    """Return the sizes of all shards of a dimension of ``length``, larger ones first."""
    if parts < 1:
        msg = f"a dimension is split into 1 part or more, got {parts}"
        raise ConfigError(msg)
    return [part.stop - part.start for part in split_evenly(length, parts)]
