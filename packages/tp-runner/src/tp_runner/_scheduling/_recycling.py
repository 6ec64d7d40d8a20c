"""Replacing workers that have done enough, or hold too much memory."""

import time

from tp_runner._options import Settings
from tp_runner._workers._fleet import Fleet

__all__ = ["Recycling"]

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
