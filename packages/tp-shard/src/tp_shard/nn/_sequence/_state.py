"""What the layers of one model know about the lengths of its sequences."""

from dataclasses import dataclass, field

import torch

from tp_shard._groups._comm import gather_sizes
from tp_shard._groups._group import Group
from tp_shard._split import bounds

__all__ = ["SequenceState"]


@dataclass(slots=True)
class SequenceState:
    """The lengths that sequences have had: with a rank's part, they give the length of the whole.

    Lengths that differ by less than the number of ranks may have parts of the same length. Then, and
    only then, ranks have to ask one another: whether they do depends on nothing but the lengths that all
    have seen, so that all ask or none does. Several lengths may be under way at once, as in an encoder and
    a decoder, or where activations are computed again for a batch before the last one.

    Attributes:
        dim: Which dimension the sequence is, counted from the end.
        lengths: All lengths so far.
        is_split_here: Whether a layer of the model splits sequences; else they come in parts, from someone
            who knows their lengths.
    """

    dim: int = -2
    lengths: set[int] = field(default_factory=set)
    is_split_here: bool = False

    def note(self, length: int, *, is_split: bool = False) -> int:
        """Remember the length of a whole sequence, and return it."""
        self.lengths.add(length)
        self.is_split_here = self.is_split_here or is_split
        return length

    def whole(self, part: int, group: Group, device: torch.device) -> int:
        """Return the length of the sequence of which this rank has ``part`` places.

        Collectives: an all-gather of a number, where the lengths so far are ambiguous.
        """
        if self.is_split_here:
            fitting = [n for n in self.lengths if _part(n, group) == part]
            if fitting and not self._has_neighbors(fitting[0], group.size):
                return fitting[0]
        return self.note(sum(gather_sizes(part, group, device)))

    def _has_neighbors(self, length: int, ranks: int) -> bool:
        """Whether other lengths may have the same part on some rank; the same on all ranks.

        Any rank may take ``length`` for one nearby, and that for the next: the whole chain counts.
        """
        chain, waiting = {length}, [length]
        while waiting:
            at = waiting.pop()
            near = {n for n in self.lengths if abs(n - at) < ranks} - chain
            chain |= near
            waiting += near
        return len(chain) > 1


def _part(length: int, group: Group) -> int:
    start, stop = bounds(length, group.size, group.rank)
    return stop - start
