"""What to do about failures, deaths and items that take too long."""

import time
from typing import TYPE_CHECKING, Any

from tp_runner._culprit import shortened, why_not_picklable
from tp_runner._failure import DIED, ITEM, RAISED, RESULT, TIMEOUT, Failure
from tp_runner._fleet import Chunk, Died
from tp_runner._report import describe_exit, failure_to_error

if TYPE_CHECKING:
    from tp_runner._call import Call

__all__ = ["Mending"]

POISON = 3
"""An item that was being worked on in so many deaths is not tried again."""


class Mending:
    """Decides which items of a chunk are tried again, and which have failed for good."""

    def __init__(self, call: "Call") -> None:
        self._call = call
        self._pool = call.pool
        # Workers that were killed for their item's slowness, and when that item began.
        self._late: dict[int, float] = {}
        self._where: dict[int, int] = {}  # the worker, by the place of the item that failed there

    def error(self, chunk: Chunk, place: int, failure: Failure) -> BaseException:
        """Make the exception for the failure of an item."""
        index = chunk.start + place
        worker = self._where.get(index, 0)
        return failure_to_error(
            failure,
            index=index,
            item=shortened(chunk.items[place]),
            device=self._pool.fleet.devices[worker],
            worker=worker,
        )

    def sort_out(self, chunk: Chunk, results: list[Any]) -> None:
        """Handle a finished chunk some of whose results are failures."""
        first = results[0]
        if (
            len(results) > 1
            and isinstance(first, Failure)
            and first.kind in {ITEM, RESULT}
            and all(result is first for result in results)
        ):
            # They could not be unpickled together; one by one the culprit shows.
            self._again(chunk, [(i, i + 1) for i in range(len(results))], tried=False)
            return
        worker = self._pool.last_worker
        bad = [place for place, result in enumerate(results) if isinstance(result, Failure)]
        self._where.update((chunk.start + place, worker) for place in bad)
        if chunk.attempts < self._pool.settings.retries:
            bad = [place for place in bad if results[place].kind == RAISED]
            if bad:
                if chunk.parent is None:
                    chunk.results = results
                self._again(chunk, [(i, i + 1) for i in bad], tried=True, results=results)
                return
        self._call.finish(chunk, results, failed=True)

    def not_sent(self, chunk: Chunk, error: Exception) -> None:
        """Handle a chunk that could not be pickled."""
        n_items = len(chunk.items)
        if n_items > 1:
            self._again(chunk, [(i, i + 1) for i in range(n_items)], tried=False)
            return
        failure = Failure.of(error, ITEM)
        failure.traceback = ""
        failure.summary = why_not_picklable(chunk.items[0], "item", error)
        self._call.finish(chunk, [failure], failed=True)

    def bury(self, died: Died) -> None:
        """Handle the death of a worker: find the item to blame, try the others again."""
        pool, worker = self._pool, died.worker
        lost = pool.lost(worker)
        mine = [chunk for chunk in lost if chunk.call == self._call.number]
        if died.failure is not None:  # it was started again, and its start raised
            device = pool.fleet.devices[worker]
            self._call.fatal = failure_to_error(died.failure, device=device, worker=worker)
            self._call.stopping = True
            self._give_up(mine, died)
            return
        began = self._late.pop(worker, None)
        late = began is not None
        if late:
            pool.fleet.revive(worker)
            revived = True
        else:
            revived = pool.revive(worker)
        current = died.current
        if late and died.began != began:
            current = None  # that item had just ended, and nobody is to blame
        elif current is None and mine and not revived and self._call.on_error == "raise":
            current = mine[0].seq, 0
        held = tuple(c.start + i for c in mine for i in range(len(c.items)))
        for chunk in mine:
            if current is not None and chunk.seq == current[0]:
                self._blame(chunk, current[1], died, late=late, revived=revived, held=held)
            elif revived or pool.any_alive():
                self._call.retry.append(chunk)
            else:
                self._give_up([chunk], died)
        if not pool.any_alive() and self._call.fatal is None:
            self._call.stopping = True
            self._call.fatal = self._death(died, held)

    def _blame(
        self, chunk: Chunk, place: int, died: Died, *, late: bool, revived: bool, held: tuple[int, ...]
    ) -> None:
        """Try a dead worker's current chunk again, save perhaps the item that was being worked on."""
        n_items, size = len(chunk.items), self._call.whole
        place -= place % size
        after = min(place + size, n_items)
        worker, settings = died.worker, self._pool.settings
        deaths = (chunk.deaths if not place else 0) + 1
        again = (
            chunk.attempts < settings.retries
            if late
            else (revived and deaths < POISON) or (not revived and chunk.attempts < settings.retries)
        )
        others = [(0, place), (after, n_items)]
        if not (revived or self._pool.any_alive()):
            self._give_up([chunk], died)
            return
        if again:
            self._again(chunk, [others[0], (place, after), others[1]], tried=late, deaths=deaths)
            return
        if late:
            failure = Failure(TIMEOUT, f"took longer than timeout_s={settings.timeout_s}")
        else:
            failure = self._death_failure(died, held)
            if revived:
                failure.summary += f"; {deaths} workers died with this item"
        self._where.update((chunk.start + i, worker) for i in range(place, after))
        self._again(chunk, [others[0], (place, after), others[1]], tried=False, fail=(place, failure))

    def _give_up(self, chunks: list[Chunk], died: Died) -> None:
        held = tuple(c.start + i for c in chunks for i in range(len(c.items)))
        for chunk in chunks:
            failure = self._death_failure(died, held)
            self._where.update((index, died.worker) for index in held)
            self._call.finish(chunk, [failure] * len(chunk.items), failed=True)

    def _death_failure(self, died: Died, held: tuple[int, ...]) -> Failure:
        failure = died.failure or Failure(DIED, describe_exit(died.exitcode))
        failure.exitcode = died.exitcode
        failure.held = held
        return failure

    def _death(self, died: Died, held: tuple[int, ...]) -> BaseException:
        device = self._pool.fleet.devices[died.worker]
        failure = self._death_failure(died, held)
        failure.summary += "; no worker is left"
        index = held[0] if held else None
        return failure_to_error(failure, index=index, device=device, worker=died.worker)

    def _again(
        self,
        chunk: Chunk,
        ranges: list[tuple[int, int]],
        *,
        tried: bool,
        results: list[Any] | None = None,
        deaths: int = 0,
        fail: tuple[int, Failure] | None = None,
    ) -> None:
        """Put parts of a chunk in line again; parts of parts belong to the whole chunk.

        Args:
            chunk: What could not be finished.
            ranges: Which parts of it.
            tried: Whether this was one of the attempts that ``retries`` counts.
            results: What is known of the rest.
            deaths: How many workers the middle range has killed.
            fail: The start of a range that has failed for good, and why.
        """
        whole, base = (chunk, 0) if chunk.parent is None else (chunk.parent, chunk.offset)
        if chunk.parent is None:
            whole.results = results or [None] * len(chunk.items)
        else:
            whole.missing -= 1
            if results is not None:
                whole.results[base : base + len(results)] = results
        parts = [(a, b) for a, b in ranges if a < b]
        whole.missing += len(parts)
        pending = [] if results is None else [i for i, r in enumerate(results) if isinstance(r, Failure)]
        asked = {i for a, b in parts for i in range(a, b)}
        whole.failed |= any(i not in asked for i in pending)
        for a, b in parts:
            part = Chunk(
                self._pool.next_seq(),
                chunk.start + a,
                chunk.items[a:b],
                chunk.call,
                parent=whole,
                offset=base + a,
                attempts=chunk.attempts + tried,
                deaths=deaths if len(ranges) == 3 and (a, b) == ranges[1] else 0,
            )
            if fail is not None and a == fail[0]:
                self._call.finish(part, [fail[1]] * (b - a), failed=True)
            else:
                self._call.retry.append(part)

    # -- items that take too long --------------------------------------------------------------

    def next_check_in(self) -> float | None:
        """Return in how many seconds an item may have taken too long."""
        limit = self._pool.settings.timeout_s
        if limit is None or not self._pool.is_waiting_for(self._call.number):
            return None
        now = time.monotonic()
        left = [limit]
        for worker in self._pool.busy():
            started = self._pool.fleet.started(worker)
            if started is not None and worker not in self._late:
                left.append(max(started[1] + limit - now, 0.001))
        return min(left)

    def check_timeouts(self) -> None:
        """Kill workers whose item has taken too long."""
        limit = self._pool.settings.timeout_s
        if limit is None:
            return
        now = time.monotonic()
        for worker in self._pool.busy():
            started = self._pool.fleet.started(worker)
            if started is not None and worker not in self._late and now - started[1] > limit:
                self._late[worker] = started[1]
                self._pool.fleet.kill(worker)
