"""What all data ranks have of the batches of an epoch, brought together in the order of the data."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from tp_core import tree_map
from tp_core.plugins import Session

__all__ = ["BATCHES_PER_ROUND", "Rounds", "on_cpu"]

BATCHES_PER_ROUND = 16  # are kept until they are exchanged: fewer cost more collectives, more cost memory


class _Contribution(NamedTuple):
    """What one rank has of a round.

    Attributes:
        data_rank: Whose share of the data it is; several ranks may have the same.
        has_more: Whether the rank is in the middle of its batches.
        values: What it has, each with the number of its batch.
    """

    data_rank: int
    has_more: bool
    values: list[tuple[int, Any]]


class Rounds:
    """Exchanges values of batches between the data ranks, a few batches at a time.

    Ranks may meet different numbers of batches, or skip some: each takes part until all have come to
    their ends. What is exchanged is pickled on the CPU, so it may be anything.

    Args:
        session: Where the ranks meet.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._rounds = 0
        self._kept: list[tuple[int, Any]] = []

    def add(self, number: int, value: Any) -> Iterator[Any]:
        """Add this rank's value of a batch, and yield values of all ranks that have come together.

        Args:
            number: Which of the batches of all data ranks it is; from 0, and growing.
            value: Tensors in containers, or anything that pickles.

        Collectives: of `Session.gather_objects`, one for so many batches; none with one data rank.
        """
        if self._session.data_size == 1:
            yield value
            return
        yield from self.reach(number)
        self._kept.append((number, tree_map(on_cpu, value)))

    def reach(self, number: int) -> Iterator[Any]:
        """Come to a batch of which this rank may have nothing, and yield as :meth:`add` does.

        Where ranks exchange something in each batch, too, all have to come to an exchange between the same
        two batches.

        Collectives: as of :meth:`add`.
        """
        while self._session.data_size > 1 and number >= (self._rounds + 1) * BATCHES_PER_ROUND:
            yield from self._exchange(has_more=True)[0]

    def finish(self) -> Iterator[Any]:
        """Yield what is left, until all ranks have come to their ends.

        Collectives: as of :meth:`add`, as many as the rank with the most batches needs.
        """
        is_over = self._session.data_size == 1
        while not is_over:
            values, is_over = self._exchange(has_more=False)
            yield from values

    def _exchange(self, *, has_more: bool) -> tuple[list[Any], bool]:
        """Return the values of this round of all ranks, and whether it was the last one."""
        self._rounds += 1
        mine = _Contribution(self._session.data_rank, has_more, self._kept)
        self._kept = []
        everyones = self._session.gather_objects(mine)
        of_data_rank = {theirs.data_rank: theirs for theirs in everyones}
        pieces = [
            (number, rank, value)
            for rank, theirs in sorted(of_data_rank.items())
            for number, value in theirs.values
        ]
        pieces.sort(key=lambda piece: piece[:2])
        return [value for _, _, value in pieces], not any(theirs.has_more for theirs in everyones)


def on_cpu(leaf: Any) -> Any:
    """Return a tensor on the CPU, without gradients; something else as it is."""
    return leaf.detach().cpu() if isinstance(leaf, Tensor) else leaf
