"""What each worker is at, in memory that its parent reads at any time, also after the worker's death."""

import mmap
import os
from collections.abc import MutableSequence
from typing import NamedTuple

from tp_runner._workers._shared_memory import unnamed_file
from tp_runner._workers._work import IDLE

WORDS = 8  # a cache line: number of the chunk, place in it, start time; then cancelled runs
FIRST_CANCELLED = 3
_ROW = WORDS * 8


class Heartbeat(NamedTuple):
    """The state of a worker."""

    seq: int  # the number of the chunk at work, ``IDLE`` or ``ENDING``
    place: int  # the place of the item at work in that chunk
    began_ns: int  # when the work on it began, by the monotonic clock; 0 between items


class Heartbeats:
    """One row of words for each worker, which the parent reads at any time.

    It outlives a worker's death, and says which item killed it.
    """

    def __init__(self, n_workers: int) -> None:
        self.fd = unnamed_file()
        os.ftruncate(self.fd, n_workers * _ROW)
        self._rows = [self.row(self.fd, worker) for worker in range(n_workers)]
        self._n_cancelled = [0] * n_workers

    @staticmethod
    def row(fd: int, worker: int) -> MutableSequence[int]:
        """Map the row of one worker."""
        whole = memoryview(mmap.mmap(fd, (worker + 1) * _ROW)).cast("q")
        return whole[worker * WORDS :]  # type: ignore[return-value]  # a memoryview of integers

    def current(self, worker: int) -> Heartbeat:
        """Return the state of a worker, dead or alive."""
        return Heartbeat._make(self._rows[worker][:FIRST_CANCELLED])

    def cancel(self, worker: int, run: int) -> None:
        """Mark a run as cancelled for a worker.

        There is room for more runs than a worker can have chunks of at a time.
        """
        row = self._rows[worker]
        if run not in row[FIRST_CANCELLED:WORDS]:
            n_places = WORDS - FIRST_CANCELLED
            row[FIRST_CANCELLED + self._n_cancelled[worker] % n_places] = run  # in place of the oldest
            self._n_cancelled[worker] += 1

    def clear(self, worker: int) -> None:
        """Mark a dead worker as idle, for the one in its place."""
        self._rows[worker][0] = IDLE

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._rows.clear()
