"""Which worker has been given what."""

from tp_runner._fleet import Chunk, Done, Fleet
from tp_runner._settings import Settings
from tp_runner._stats import Tally

__all__ = ["Roster"]


class Roster:
    """A fleet, and the chunks that its workers have been given, of this call or an earlier one.

    Attributes:
        fleet: The workers.
        settings: How they are run.
        tally: What they did.
        last_worker: The worker whose results came last.
    """

    def __init__(self, fleet: Fleet, settings: Settings) -> None:
        self.fleet = fleet
        self.settings = settings
        self.tally = Tally(fleet.devices, settings.timeline)
        self.last_worker = 0
        self._restarts_left = settings.restart
        self._inflight: dict[int, tuple[int, Chunk]] = {}
        self._loads = [0] * fleet.size
        self._seq = 0

    def forget_all(self) -> None:
        """Note that nothing is on its way any more."""
        self._inflight.clear()
        self._loads = [0] * self.fleet.size

    def next_seq(self) -> int:
        """Return a number that no chunk has had."""
        self._seq += 1
        return self._seq

    def idlest(self, credit: int) -> int | None:
        """Return the worker with the least to do, if one has less than ``credit`` chunks."""
        best, least = None, credit
        for worker, load in enumerate(self._loads):
            if load < least and self.fleet.ready(worker):
                best, least = worker, load
        return best

    def send(self, worker: int, chunk: Chunk) -> None:
        """Hand a chunk to a worker."""
        self.fleet.send(worker, chunk)
        self._inflight[chunk.seq] = worker, chunk
        self._loads[worker] += 1

    def arrived(self, done: Done) -> Chunk | None:
        """Return the chunk that has come back."""
        entry = self._inflight.pop(done.seq, None)
        if entry is None:
            return None
        worker, chunk = entry
        self._loads[worker] -= 1
        self.last_worker = worker
        self.tally.done(worker, chunk.start, len(chunk.items), done.timing)
        return chunk

    def lost(self, worker: int) -> list[Chunk]:
        """Return the chunks that a dead worker had been given, in that order."""
        chunks = [chunk for other, chunk in self._inflight.values() if other == worker]
        for chunk in chunks:
            del self._inflight[chunk.seq]
        self._loads[worker] = 0
        self.tally.died(worker)
        return chunks

    def revive(self, worker: int) -> bool:
        """Start a dead worker again, if ``restart`` allows it."""
        if not self._restarts_left:
            return False
        self._restarts_left -= 1
        self.fleet.revive(worker)
        return True

    def busy(self) -> list[int]:
        """Return the workers that have something to do."""
        return [worker for worker, load in enumerate(self._loads) if load]

    def is_waiting_for(self, call: int) -> bool:
        """Whether chunks of a call are with workers."""
        return any(chunk.call == call for _, chunk in self._inflight.values())

    def any_alive(self) -> bool:
        """Whether there is a worker left."""
        return any(self.fleet.alive(worker) for worker in range(self.fleet.size))
