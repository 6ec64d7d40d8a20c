"""What all data ranks have of the batches of an epoch, brought together in the order of the data."""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from torch import Tensor
from tp_core import tree_map
from tp_core.plugins import Session

from tp_trainer._opening._boundaries import StepBoundaries

__all__ = ["BATCHES_PER_ROUND", "CutShortError", "Rounds", "on_cpu"]

BATCHES_PER_ROUND = 16  # are kept until they are exchanged: fewer cost more collectives, more cost memory


class CutShortError(Exception):
    """A signal asks the run to end: all ranks leave what they go over, between the same two batches.

    Attributes:
        signal: Its number.
    """

    def __init__(self, signal: int) -> None:
        super().__init__(signal)
        self.signal = signal


class _Contribution(NamedTuple):
    """What one rank has of a round.

    Attributes:
        data_rank: Whose share of the data it is; several ranks may have the same.
        has_more: Whether the rank is in the middle of its batches.
        signal: The signal that it has seen, or 0.
        values: What it has, each with the number of its batch.
    """

    data_rank: int
    has_more: bool
    signal: int
    values: list[tuple[int, Any]]


class Rounds:
    """Exchanges values of batches between the data ranks, a few batches at a time.

    Ranks may meet different numbers of batches, or skip some: each takes part until all have come to
    their ends. What is exchanged is pickled on the CPU, so it may be anything.

    Args:
        session: Where the ranks meet.
        boundaries: Where a signal cuts the batches short: the ranks exchange what they have seen at the
            boundary on which they agree. ``None`` if nobody is to ask.
        keeps: Whether values are exchanged, too.
    """

    def __init__(
        self, session: Session, *, boundaries: StepBoundaries | None = None, keeps: bool = True
    ) -> None:
        self._session, self._boundaries = session, boundaries
        if boundaries is not None:
            boundaries.begin_phase(evaluates=True)
        self._gathers = keeps and session.data_size > 1
        self._exchanges = self._gathers or (boundaries is not None and session.world_size > 1)
        self._end: float = BATCHES_PER_ROUND if self._gathers else math.inf  # of this round
        self._kept: list[tuple[int, Any]] = []

    def add(self, number: int, value: Any) -> Iterator[Any]:
        """Add this rank's value of a batch, and yield values of all ranks that have come together.

        Args:
            number: Which of the batches of all data ranks it is; from 0, and growing.
            value: Tensors in containers, or anything that pickles.

        Collectives: of `Session.gather_objects`, one for so many batches and where the ranks meet.
        """
        yield from self.reach(number)
        if self._session.data_size == 1:
            yield value
            return
        self._kept.append((number, tree_map(on_cpu, value)))

    def reach(self, number: int) -> Iterator[Any]:
        """Begin a batch of which this rank may have nothing, and yield as :meth:`add` does.

        Where ranks exchange something in each batch, too, all have to come to an exchange between the same
        two batches.

        Raises:
            CutShortError: A rank has seen a signal.

        Collectives: as of :meth:`add`.
        """
        boundaries = self._boundaries
        if boundaries is not None:
            if boundaries.passed > number:
                return  # it was begun before
            boundaries.passed = number + 1
            if boundaries.calls and boundaries.is_meeting():
                values, _ = self._exchange(has_more=True)
                boundaries.has_met()
                yield from values
        while number >= self._end:
            self._end += BATCHES_PER_ROUND
            yield from self._exchange(has_more=True)[0]

    def finish(self) -> Iterator[Any]:
        """Yield what is left, until all ranks have come to their ends.

        Raises:
            CutShortError: A rank has seen a signal.

        Collectives: as of :meth:`add`, as many as the rank with the most batches needs.
        """
        if self._boundaries is not None:
            self._boundaries.passed = -1  # it waits for the others wherever they meet: any boundary will do
        is_over = not self._exchanges
        while not is_over:
            values, is_over = self._exchange(has_more=False)
            if is_over and self._boundaries is not None:
                self._boundaries.begin_phase(evaluates=True)  # that of what is gone over around this
            yield from values

    def _exchange(self, *, has_more: bool) -> tuple[list[Any], bool]:
        """Return the values of this round of all ranks, and whether it was the last one."""
        signal = 0 if self._boundaries is None else self._boundaries.seen
        mine = _Contribution(self._session.data_rank, has_more, signal, self._kept)
        self._kept = []
        everyones = self._session.gather_objects(mine)
        if signal := max(theirs.signal for theirs in everyones):
            raise CutShortError(signal)
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
