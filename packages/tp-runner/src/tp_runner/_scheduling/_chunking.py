"""How many items travel together: as many as make the journey cheap, no more."""

import time

__all__ = ["Chunking"]

TARGET_S = 2e-3
"""Work aimed at in one chunk: some tens of times what the journey costs."""
FLOOR_S = 2e-4
"""At the end of the input chunks shrink, so that workers end together, but not below this."""
MOST_BYTES = 1 << 20
MOST_ITEMS = 8192
LONG_S = 5e-3
"""A chunk with more work than this is handed over only when its worker is idle."""
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
            wanted = min(wanted, MOST_BYTES / self.bytes_per_item)
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

    def credits(self) -> int:
        """Return how many chunks one worker may have been given at a time."""
        if self.is_long():
            # Unless the caller comes by so rarely that workers would wait for it.
            return 2 if self.waits_for_consumer() else 1
        return 2 if self._item_s * self.size > TARGET_S / 4 else 3
