"""How many actors there are: when a busy fleet grows, and when an idle one shrinks."""

import time
from collections.abc import Collection

GROW_S = 1.0
"""After so long with every worker busy another one starts."""
BREATH_S = 0.1
"""For so long a worker between two items still counts as busy: else a fleet with items of milliseconds would
never grow (test_a_worker_between_two_items_counts_as_busy)."""
IDLE_S = 10.0
"""After so long without work a worker beyond the fewest ends."""


class Scaling:
    """The growth and shrinkage of a fleet: when another worker starts, and which idle one ends."""

    def __init__(self, fewest: int, most: int) -> None:
        self.fewest = fewest
        self._most = most
        self._busy_since: float | None = None
        self._free_since: float | None = None  # since when not all of them are busy
        self._idle_since: dict[int, float] = {}

    @property
    def interval_s(self) -> float | None:
        """The time between two decisions; ``None`` where there is nothing to decide."""
        if self.fewest < self._most:
            return GROW_S
        return None

    def worker_to_start(
        self, running: Collection[int], busy: Collection[int], lost: Collection[int]
    ) -> int | None:
        now = time.monotonic()
        if len(busy) == len(running):
            self._free_since = None
        elif self._free_since is None:
            self._free_since = now
        if self._free_since is not None and now - self._free_since >= BREATH_S:
            self._busy_since = None
            return None
        if self._busy_since is None:
            self._busy_since = now
        if now - self._busy_since < GROW_S:
            return None
        self._busy_since = None
        return next((n for n in range(self._most) if n not in running and n not in lost), None)

    def idle_workers(self, ready: Collection[int], busy: Collection[int]) -> list[int]:
        """Return the workers beyond the fewest that have been idle for long."""
        now = time.monotonic()
        self._idle_since = {n: self._idle_since.get(n, now) for n in ready if n not in busy}
        late = [n for n, since in self._idle_since.items() if n >= self.fewest and now - since >= IDLE_S]
        for n in late:
            del self._idle_since[n]
        return late
