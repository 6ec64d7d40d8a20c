"""A few words of shared memory in which each worker says what it is doing."""

import mmap
import os
from collections.abc import MutableSequence

from tp_runner._arena import unnamed_file
from tp_runner._work import IDLE

__all__ = ["Board"]

WORDS = 8  # a cache line: sequence number of the chunk, place in it, when that began
_ROW = WORDS * 8


class Board:
    """One row of words for each worker, which the parent reads without asking.

    It outlives a worker's death: this is how the item that killed it is known.
    """

    def __init__(self, n_workers: int) -> None:
        self.fd = unnamed_file()
        os.ftruncate(self.fd, n_workers * _ROW)
        self._rows = [self.row(self.fd, worker) for worker in range(n_workers)]

    @staticmethod
    def row(fd: int, worker: int) -> MutableSequence[int]:
        """Map the row of one worker."""
        whole = memoryview(mmap.mmap(fd, (worker + 1) * _ROW)).cast("q")
        return whole[worker * WORDS :]  # type: ignore[return-value]  # a memoryview of integers

    def current(self, worker: int) -> tuple[int, int, int]:
        """Return the sequence number, the place in that chunk and when work on it began."""
        row = self._rows[worker]
        return row[0], row[1], row[2]

    def clear(self, worker: int) -> None:
        """Forget what a dead worker was doing."""
        self._rows[worker][0] = IDLE

    def close(self) -> None:
        """Close the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._rows.clear()
