"""How many items travel together, and how much of one run may be on its way."""

import time

from tp_runner._options import Settings
from tp_runner._workers._fleet import Chunk, Fleet

__all__ = ["Bounds", "Chunking"]

TARGET_S = 2e-3
"""Work aimed at in one chunk: some tens of times what the journey costs."""
FLOOR_S = 2e-4
"""At the end of the input chunks shrink, so that workers end together, but not below this."""
MOST_BYTES = 1 << 20
"""With more, a chunk would no longer stay in the caches of the processor that works on it."""
FEW = 3
"""So many large items travel together all the same, if they have no more than four times as much: what the
journey costs beyond the copying is worth sharing."""
MOST_ITEMS = 8192
LONG_S = 5e-3
"""A chunk with more work than this is handed to an idle worker only, or while the end is far."""
JOURNEY_MATTERS_S = 50e-3
"""Beyond this, half a millisecond of waiting for the next chunk does not matter."""
FAR_FROM_END = 8
"""With so many chunks left for each worker, one behind a slow item is done before the others end."""
SLOW_CONSUMER = 0.9
"""With this share of the time spent by the consumer, larger chunks would gain nothing."""


class Chunking:
    """Follows the measured time and size of the items.

    Attributes:
        size: How many items the next chunk should have.
        bytes_per_item: What an item or its result, whichever is larger, takes on its journey.
    """

    def __init__(self, *, whole: int = 1, most: int = MOST_ITEMS) -> None:
        self._whole = whole
        self._most = max(whole, most - most % whole)
        self.size = whole
        self.bytes_per_item = 0.0
        self._item_s = 0.0
        self._consumer_s = 0.0
        self._since = time.monotonic()

    def consumed(self, seconds: float) -> None:
        """Note how long the consumer took over what it was given."""
        if not self._consumer_s:
            self._since = time.monotonic() - seconds
        self._consumer_s += seconds

    def waits_for_consumer(self) -> bool:
        """Whether most of the time goes by in the consumer, so that workers have time to spare."""
        return self._consumer_s > 0.5 * (time.monotonic() - self._since)

    def learn(self, n_items: int, worked_s: float, nbytes: int) -> None:
        """Note what a finished chunk took."""
        item_s = worked_s / n_items
        self._item_s = item_s if not self._item_s else 0.7 * self._item_s + 0.3 * item_s
        self.bytes_per_item = max(nbytes / n_items, 0.9 * self.bytes_per_item)
        wanted = min(TARGET_S / max(self._item_s, 1e-9), self._most)
        if self.bytes_per_item:
            cached = MOST_BYTES / self.bytes_per_item
            wanted = min(wanted, max(cached, min(4 * cached, FEW)))
        if wanted < self.size:
            self.size = self._rounded(wanted)
        elif n_items >= self.size:
            self._grow(wanted)

    def _grow(self, wanted: float) -> None:
        now = time.monotonic()
        elapsed = now - self._since
        if self._consumer_s < SLOW_CONSUMER * elapsed:
            self.size = self._rounded(min(2 * self.size, wanted))
        if elapsed > 0.1:
            self._since, self._consumer_s = now - elapsed / 2, self._consumer_s / 2

    def _rounded(self, size: float) -> int:
        whole = self._whole
        return max(whole, int(size) - int(size) % whole)

    def next_size(self, remaining: int | None, n_workers: int) -> int:
        """Return the size of the next chunk, given how many items are left."""
        if remaining is None:
            return self.size
        fair = max(remaining // (2 * n_workers), 1)
        if self._item_s:
            fair = max(fair, int(FLOOR_S / self._item_s))
        return min(self.size, self._rounded(fair))

    def is_long(self) -> bool:
        """Whether a chunk takes long, or nobody knows yet."""
        expected_s = self._item_s * self.size
        return not expected_s or expected_s > LONG_S

    def credits(self, remaining: int | None, n_workers: int) -> int:
        """Return how many chunks one worker may have been given at a time, given how many items are left."""
        if self.is_long():
            # Unless the caller comes by so rarely that workers would wait for it.
            return 2 if self.waits_for_consumer() or self._may_wait(remaining, n_workers) else 1
        # What is on its way shall fit into the processors' caches.
        is_large = self.bytes_per_item * self.size > MOST_BYTES / 2
        return 2 if is_large or self._item_s * self.size > TARGET_S / 4 else 3

    def _may_wait(self, remaining: int | None, n_workers: int) -> bool:
        """Whether a chunk may wait behind one that takes long, and nobody ends later for it."""
        if remaining is None or remaining < FAR_FROM_END * n_workers * self.size:
            return False
        return 0 < self._item_s * self.size < JOURNEY_MATTERS_S


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
        """Count a new chunk, whose size in bytes nobody knows yet, as a rule."""
        self._n_items += len(chunk.items)
        self.nbytes += chunk.nbytes
        self.n_chunks += 1

    def out(self, chunk: Chunk) -> Chunk:
        """Count a chunk no more."""
        self._n_items -= len(chunk.items)
        self.n_chunks -= 1
        self.nbytes -= chunk.nbytes
        return chunk

    def credits(self, remaining: int | None) -> int:
        """Return how many chunks one worker may have been given at a time, given how many items are left."""
        return self.chunking.credits(remaining, self._n_workers)

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
