"""What all data ranks have of the batches of an epoch, brought together in the order of the data."""

import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from torch import Tensor
from tp_core import tree_map
from tp_core.plugins import Session

__all__ = ["BATCHES_PER_ROUND", "CutShortError", "Rounds", "on_cpu"]

BATCHES_PER_ROUND = 16  # are kept until they are exchanged: fewer cost more collectives, more cost memory
_ROUND_S = 0.5  # at most, where ranks also tell each other of signals


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
        seconds: Since the round before.
        values: What it has, each with the number of its batch.
    """

    data_rank: int
    has_more: bool
    signal: int
    seconds: float
    values: list[tuple[int, Any]]


class Rounds:
    """Exchanges values of batches between the data ranks, a few batches at a time.

    Ranks may meet different numbers of batches, or skip some: each takes part until all have come to
    their ends. What is exchanged is pickled on the CPU, so it may be anything.

    Args:
        session: Where the ranks meet.
        seen: Returns the signal that this rank has seen, or 0: then rounds are so short that all ranks learn
            of it within half a second of batches, or after one batch that takes longer. ``None`` if nobody
            is to ask.
        keeps: Whether values are exchanged, too.
    """

    def __init__(
        self, session: Session, *, seen: Callable[[], int] | None = None, keeps: bool = True
    ) -> None:
        self._session, self._seen, self._keeps = session, seen, keeps
        asks = seen is not None and session.world_size > 1
        self._exchanges = asks or (keeps and session.data_size > 1)
        self._batches = 1 if asks else BATCHES_PER_ROUND  # of a round
        self._end = self._batches  # of this one
        self._began = time.perf_counter()
        self._kept: list[tuple[int, Any]] = []

    def add(self, number: int, value: Any) -> Iterator[Any]:
        """Add this rank's value of a batch, and yield values of all ranks that have come together.

        Args:
            number: Which of the batches of all data ranks it is; from 0, and growing.
            value: Tensors in containers, or anything that pickles.

        Collectives: of `Session.gather_objects`, one for so many batches; none with one data rank.
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
        if self._seen is not None and self._session.world_size == 1 and (signal := self._seen()):
            raise CutShortError(signal)
        while self._exchanges and number >= self._end:
            yield from self._exchange(has_more=True)[0]

    def finish(self) -> Iterator[Any]:
        """Yield what is left, until all ranks have come to their ends.

        Raises:
            CutShortError: A rank has seen a signal.

        Collectives: as of :meth:`add`, as many as the rank with the most batches needs.
        """
        is_over = not self._exchanges
        while not is_over:
            values, is_over = self._exchange(has_more=False)
            yield from values

    def _exchange(self, *, has_more: bool) -> tuple[list[Any], bool]:
        """Return the values of this round of all ranks, and whether it was the last one."""
        signal = 0 if self._seen is None else self._seen()
        seconds = time.perf_counter() - self._began
        mine = _Contribution(self._session.data_rank, has_more, signal, seconds, self._kept)
        self._kept = []
        everyones = self._session.gather_objects(mine)
        self._began = time.perf_counter()
        if signal := max(theirs.signal for theirs in everyones):
            raise CutShortError(signal)
        if self._seen is not None:
            factor = min(_ROUND_S / max(1e-6, *(theirs.seconds for theirs in everyones)), 10.0)
            batches = max(1, int(self._batches * factor))
            self._batches = min(batches, BATCHES_PER_ROUND) if self._keeps else batches
        self._end += self._batches
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
