"""How much of one run may be on its way."""

from tp_runner._options import Settings
from tp_runner._scheduling._chunking import MOST_ITEMS, Chunking
from tp_runner._workers._events import Chunk
from tp_runner._workers._fleet import Fleet

__all__ = ["Bounds"]

CHUNKS_PER_WORKER = 16
"""So many chunks may be on their way or waiting for their turn, for each worker: enough for the
workers to go on while a slow item holds up those behind it."""
FEW_CHUNKS = 4
"""The same while it is the consumer that everybody waits for."""


class Bounds:
    """Counts what is on its way, and says how large the next chunk may be.

    Args:
        settings: How the runner is run.
        fleet: The workers.

    Attributes:
        n_chunks: How many chunks are on their way, or wait for their turn.
        nbytes: What they take.
        whole: Items travel in multiples of so many: in batches, where there are some.
        chunking: How many items travel together.
    """

    def __init__(self, settings: Settings, fleet: Fleet) -> None:
        self.n_chunks = 0
        self.nbytes = 0
        self.whole = settings.batching.size if settings.batching else 1
        self._n_items = 0
        self._n_workers = fleet.size
        self._max_bytes = settings.max_bytes
        self._limit: int | None = None
        most = fleet.most_items or MOST_ITEMS
        if settings.queue_scale is not None:
            self._limit = max(int(settings.queue_scale * fleet.size), fleet.size, self.whole)
            most = min(most, max(1, self._limit // (2 * fleet.size)))
        self.chunking = Chunking(whole=self.whole, most=max(most, self.whole))

    def into(self, chunk: Chunk) -> None:
        """Count a new chunk, whose size in bytes nobody knows yet."""
        self._n_items += len(chunk.items)
        self.n_chunks += 1

    def out(self, chunk: Chunk) -> Chunk:
        """Count a chunk no more."""
        self._n_items -= len(chunk.items)
        self.n_chunks -= 1
        self.nbytes -= chunk.nbytes
        return chunk

    def room(self, remaining: int | None, most: int | None) -> int:
        """Return how many items the next chunk may have; 0 if there shall be none now.

        Args:
            remaining: How many the input still has, if that is known.
            most: How many a worker takes at most.
        """
        n_items = self.chunking.next_size(remaining, self._n_workers)
        if most is not None:
            n_items = min(n_items, max(most, self.whole))
        if self._limit is not None:
            n_items = min(n_items, self._limit - self._n_items)
        else:
            slow = self.chunking.waits_for_consumer()
            if self.n_chunks >= (FEW_CHUNKS if slow else CHUNKS_PER_WORKER) * self._n_workers:
                return 0
        if self.n_chunks and self.chunking.bytes_per_item:
            left = self._max_bytes - self.nbytes
            n_items = min(n_items, int(left / self.chunking.bytes_per_item))
        return n_items if n_items >= self.whole else 0
