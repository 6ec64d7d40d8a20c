"""Which worker has been given what, and which has done enough, or holds too much memory."""

import time
from collections.abc import Container

from tp_runner._options import Settings
from tp_runner._workers._fleet import Chunk, Done, Fleet

__all__ = ["Assignments", "Recycling"]

LATE_S = 0.01
"""After so long without a word a worker is not as quick as it was thought to be."""

_NONE = (0, 0)


class Assignments:
    """The chunks that workers have been given and not answered yet, of every run.

    Args:
        fleet: The workers.
    """

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._inflight: dict[int, tuple[int, Chunk]] = {}
        self._loads = [0] * fleet.size
        self._n_long = [0] * fleet.size
        self._since = [0.0] * fleet.size  # the last sign of life of those that have something to do
        self._counts: dict[tuple[int, int], tuple[int, int]] = {}  # of a worker and a run: chunks, long ones
        self._seq = 0

    def next_seq(self) -> int:
        """Return a number that no chunk has had."""
        self._seq += 1
        return self._seq

    def idlest(self, run: int, most: int) -> int | None:
        """Return the worker with the least to do, if it may be given another chunk of a run.

        Args:
            run: The number of the run.
            most: How many chunks of this run one worker may have.
        """
        best, least = None, self._fleet.most_credits
        for worker, load in enumerate(self._loads):
            if load < least and self._may_have_more(worker, run, most) and self._fleet.ready(worker):
                best, least = worker, load
        return best

    def _may_have_more(self, worker: int, run: int, most: int) -> bool:
        own, own_long = self._counts.get((worker, run), _NONE)
        if own == self._loads[worker]:
            return own < most
        # Behind chunks of other runs only where those are short, and as good as their word: who waits
        # for a result shall not wait for somebody else's long item while another worker is free.
        is_late = time.monotonic() - self._since[worker] > LATE_S
        return own < most and own_long == self._n_long[worker] and not is_late

    def send(self, worker: int, chunk: Chunk) -> None:
        """Hand a chunk to a worker."""
        chunk.sent += 1  # before a thread can look at it
        try:
            self._fleet.send(worker, chunk)
        except BaseException:
            chunk.sent -= 1
            raise
        self._inflight[chunk.seq] = worker, chunk
        if not self._loads[worker]:
            self._since[worker] = time.monotonic()
        self._count(worker, chunk, 1)

    def arrived(self, done: Done) -> Chunk | None:
        """Return the chunk that has come back; ``None`` if nobody knows it any more."""
        if done.seq not in self._inflight:
            return None
        self._since[done.worker] = time.monotonic()
        return self._taken_back(done.seq)

    def lost(self, worker: int) -> list[Chunk]:
        """Return the chunks that a dead worker had been given, in that order."""
        seqs = [seq for seq, (other, _) in self._inflight.items() if other == worker]
        return [self._taken_back(seq) for seq in seqs]

    def all_lost(self) -> list[Chunk]:
        """Return every chunk that is with a worker, in the order in which they were given."""
        return [self._taken_back(seq) for seq in list(self._inflight)]

    def _taken_back(self, seq: int) -> Chunk:
        worker, chunk = self._inflight.pop(seq)
        self._count(worker, chunk, -1)
        return chunk

    def _count(self, worker: int, chunk: Chunk, by: int) -> None:
        key = worker, chunk.run
        n_chunks, n_long = self._counts.pop(key, _NONE)
        n_chunks, n_long = n_chunks + by, n_long + by * chunk.is_long
        if n_chunks:  # runs come and go: nothing is kept of those that have none here
            self._counts[key] = n_chunks, n_long
        self._loads[worker] += by
        self._n_long[worker] += by * chunk.is_long

    def busy(self) -> list[int]:
        """Return the workers that have something to do."""
        return [worker for worker, load in enumerate(self._loads) if load]

    def holders(self, run: int) -> list[int]:
        """Return the workers that have chunks of a run."""
        return [worker for worker in range(len(self._loads)) if (worker, run) in self._counts]

    def at_work(self, runs: Container[int]) -> set[int]:
        """Return the workers that are at work on one of some runs: each does first what it got first."""
        first: dict[int, int] = {}
        for worker, chunk in self._inflight.values():
            first.setdefault(worker, chunk.run)
        return {worker for worker, run in first.items() if run in runs}

    def any_alive(self) -> bool:
        """Whether there is a worker left."""
        return any(self._fleet.alive(worker) for worker in range(self._fleet.size))


PERIOD_S = 0.1
"""How often the memory of a worker is looked at, at most."""


class Recycling:
    """Counts what each worker was given since it was started, and has it retire in time.

    Args:
        fleet: The workers.
        settings: How many items, and how much memory, a worker may have.
    """

    def __init__(self, fleet: Fleet, settings: Settings) -> None:
        self._fleet = fleet
        self._most_items = settings.max_items_per_worker
        self._most_bytes = settings.max_memory_per_worker
        self._n_items = [0] * fleet.size
        self._looked = [0.0] * fleet.size

    def left(self, worker: int) -> int | None:
        """Return how many items more a worker may be given; ``None`` for any number."""
        return None if self._most_items is None else self._most_items - self._n_items[worker]

    def on_sent(self, worker: int, n_items: int) -> None:
        """Note what a worker was given."""
        if self._most_items is not None:
            self._n_items[worker] += n_items
            if self._n_items[worker] >= self._most_items:
                self._fleet.retire(worker)

    def on_done(self, worker: int) -> None:
        """Look at a worker that has done something."""
        if self._most_bytes is None or time.monotonic() - self._looked[worker] < PERIOD_S:
            return
        self._looked[worker] = time.monotonic()
        held = self._fleet.private_memory(worker)
        if held is not None and held > self._most_bytes:
            self._fleet.retire(worker)

    def on_end(self, worker: int) -> None:
        """Note that a worker has ended."""
        self._n_items[worker] = 0
