"""How a tensor is cut into the shards that the ranks hold."""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from tp_shard._partition import bounds

__all__ = ["Ranges", "Split"]

Ranges = tuple[tuple[int, int], ...]
"""Where the pieces of one shard begin and end in the whole tensor."""


@dataclass(frozen=True, slots=True)
class Split:
    """Which parts of one dimension of a tensor each rank holds.

    Attributes:
        dim: The dimension of the tensor itself that is cut.
        size: Its size over all shards.
        ranges: For each rank the pieces of its shard, in the order in which it holds them. Ranks
            may hold the same piece, such as a key head that several query heads share.
    """

    dim: int
    size: int
    ranges: tuple[Ranges, ...]

    @classmethod
    def even(cls, dim: int, size: int, parts: int) -> Self:
        """Cut ``size`` into ``parts`` whose sizes differ by at most one, larger ones first."""
        return cls(dim, size, tuple((bounds(size, parts, i),) for i in range(parts)))

    @property
    def parts(self) -> int:
        """Into how many shards it is cut."""
        return len(self.ranges)

    @property
    def is_even(self) -> bool:
        """Whether this is the cut that :meth:`even` makes."""
        return all(r == (bounds(self.size, self.parts, i),) for i, r in enumerate(self.ranges))

    def local_size(self, rank: int) -> int:
        """Return the size of the dimension on ``rank``."""
        return sum(stop - start for start, stop in self.ranges[rank])

    def local_shape(self, shape: tuple[int, ...], rank: int) -> tuple[int, ...]:
        """Return the shape of the shard of ``rank`` of a tensor of ``shape``."""
        return (*shape[: self.dim], self.local_size(rank), *shape[self.dim + 1 :])

    def full_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the whole tensor of which a shard has ``shape``."""
        return (*shape[: self.dim], self.size, *shape[self.dim + 1 :])

    def take(self, full: Tensor, rank: int) -> Tensor:
        """Return the shard of ``rank`` in storage of its own, so that ``full`` can be freed."""
        pieces = [full.narrow(self.dim, a, b - a) for a, b in self.ranges[rank]]
        if len(pieces) == 1:
            return pieces[0].clone(memory_format=torch.contiguous_format)
        return torch.cat(pieces, self.dim)

    def put(self, full: Tensor, shard: Tensor, rank: int) -> None:
        """Write the shard of ``rank`` to where it belongs in ``full``."""
        sizes = [b - a for a, b in self.ranges[rank]]
        for (a, b), piece in zip(self.ranges[rank], torch.split(shard, sizes, self.dim), strict=True):
            full.narrow(self.dim, a, b - a).copy_(piece)
