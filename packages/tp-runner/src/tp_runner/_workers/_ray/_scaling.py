"""How many actors there are, between the fewest and the most that a runner may have."""

import time
from collections.abc import Collection

__all__ = ["Scaling"]

GROW_S = 1.0
"""After so long with every worker busy there is one more."""
BREATH_S = 0.1
"""For so long a worker may be between two items, and still counts as busy."""
IDLE_S = 10.0
"""After so long without anything to do a worker beyond the fewest ends."""


class Scaling:
    """Says when another worker is worth starting, and which one has nothing to do.

    Args:
        fewest: How many workers there are at least.
        most: How many at most.
    """

    def __init__(self, fewest: int, most: int) -> None:
        self.fewest = fewest
        self._most = most
        self._busy_since: float | None = None
        self._free_since: float | None = None  # since when not all of them have something to do
        self._idle_since: dict[int, float] = {}

    @property
    def interval_s(self) -> float | None:
        """How often to look; ``None`` where there is nothing to decide."""
        return GROW_S if self.fewest < self._most else None

    def grown(self, running: Collection[int], busy: Collection[int], lost: Collection[int]) -> int | None:
        """Return the number of a worker to start now, if another one is wanted.

        Args:
            running: The workers there are, those that are starting among them.
            busy: Those that have something to do.
            lost: Those that died and are not to be started again.
        """
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

    def idle(self, ready: Collection[int], busy: Collection[int]) -> list[int]:
        """Return the workers that have had nothing to do for long, and are more than the fewest."""
        now = time.monotonic()
        self._idle_since = {n: self._idle_since.get(n, now) for n in ready if n not in busy}
        late = [n for n, since in self._idle_since.items() if n >= self.fewest and now - since >= IDLE_S]
        for n in late:
            del self._idle_since[n]
        return late
