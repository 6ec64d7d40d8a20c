"""One pass over an input: hands out chunks, gathers results, puts them in order, mends faults."""

import collections
import itertools
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from tp_runner._chunking import MOST_ITEMS, Chunking
from tp_runner._errors import RunCancelled, RunnerBusy
from tp_runner._failure import Failure
from tp_runner._fleet import Chunk, Died, Done
from tp_runner._mending import Mending
from tp_runner._source import Source

if TYPE_CHECKING:
    from tp_runner._pool import RunnerPool

__all__ = ["Call"]

CHUNKS_PER_WORKER = 16
"""So many chunks may be on their way or waiting for their turn, for each worker: enough for the
workers to go on while a slow item holds up those behind it."""
FEW_CHUNKS = 4
"""The same while it is the consumer that everybody waits for."""


class Call:
    """The state of one pass.

    Everything happens in the thread of whoever asks for the next results, so there is nothing to
    hand over and nothing to lock; only the input may be read in a thread of its own.

    Args:
        pool: The workers, and what is known of them beyond this call.
        source: The input.
        ordered: Whether results come in the order of the items.
        number: This call's number.
        numbered: Whether to give each result with the place of its item.
        on_error: ``"raise"`` a failure or ``"return"`` it in the item's place.
    """

    def __init__(
        self,
        pool: "RunnerPool",
        source: Source,
        *,
        ordered: bool,
        number: int,
        numbered: bool,
        on_error: str,
    ) -> None:
        self.pool = pool
        self.source = source
        self.number = number
        self.owner = threading.get_ident()
        self.on_error = on_error
        self.ended_by: str | None = None
        self.stopping = False
        self.fatal: BaseException | None = None
        self.retry: collections.deque[Chunk] = collections.deque()
        self._ordered = ordered
        self._numbered = numbered
        self._queue: collections.deque[Chunk] = collections.deque()  # ordered: all; else finished
        self._next_index = 0
        self._n_items = 0  # on their way, or waiting for their turn
        self._n_chunks = 0
        self._nbytes = 0
        self._given: list[Any] = []
        settings = pool.settings
        batching = settings.batching
        whole = batching.size if batching else 1
        self._limit: int | None = None
        most = pool.fleet.most_items or MOST_ITEMS
        if settings.queue_scale is not None:
            self._limit = max(int(settings.queue_scale * pool.fleet.size), pool.fleet.size, whole)
            most = min(most, max(1, self._limit // (2 * pool.fleet.size)))
        self.whole = whole
        self.chunking = Chunking(whole=whole, most=max(most, whole))
        self.mending = Mending(self)

    # -- what the caller sees ------------------------------------------------------------------

    def results(self) -> Iterator[list[Any]]:
        """Yield lists of results, each as soon as it may be given."""
        pool, clock = self.pool, time.monotonic
        direct = pool.fleet.direct
        while True:
            self._check()
            chunk = self._next_finished()
            if chunk is None:
                if self._is_over():
                    return
                self._dispatch()
                if not self._has_finished() and (self._n_chunks or not self.source.exhausted):
                    self._wait()
                continue
            if not direct and not self.stopping:
                self._handle(pool.fleet.poll(0))
                self._dispatch()
            given, error = self._outcome(chunk)
            chunk = None
            if given:
                pool.tally.delivered += len(given)
                self._given = given
                began = clock()
                yield given
                self.chunking.consumed(clock() - began)
                given = self._given = []
            if error is not None:
                raise error

    def end(self, reason: str | None = None) -> None:
        """Stop; what the workers still do is thrown away when it comes."""
        if reason is not None and self.ended_by is None:
            self.ended_by = reason
        self._given.clear()
        self._queue.clear()
        self.retry.clear()
        self.source.close()

    # -- the loop ------------------------------------------------------------------------------

    def _check(self) -> None:
        if self.ended_by == "cancelled":
            msg = "the call was cancelled"
            raise RunCancelled(msg)
        if self.ended_by is not None:
            raise RunnerBusy(self.ended_by)

    def _is_over(self) -> bool:
        if self.fatal is not None and (not self._n_chunks or not self._ordered):
            raise self.fatal
        if self._n_chunks:
            return False
        if self.source.exhausted and self.source.error is not None:
            raise self.source.error
        return self.source.exhausted

    def _next_finished(self) -> Chunk | None:
        queue = self._queue
        if not queue:
            return None
        chunk = queue[0]
        if self._ordered:
            if not chunk.results or chunk.missing:
                if self.fatal is not None and not self.pool.is_waiting_for(self.number):
                    raise self.fatal
                return None
        elif chunk.failed and self.on_error == "raise":
            # Others that have finished go first.
            good = next((c for c in queue if not c.failed), None)
            if good is not None:
                queue.remove(good)
                return self._counted_out(good)
        queue.popleft()
        return self._counted_out(chunk)

    def _has_finished(self) -> bool:
        if not self._queue:
            return False
        return not self._ordered or bool(self._queue[0].results and not self._queue[0].missing)

    def _counted_out(self, chunk: Chunk) -> Chunk:
        self._n_items -= len(chunk.items)
        self._n_chunks -= 1
        self._nbytes -= chunk.nbytes
        return chunk

    def _outcome(self, chunk: Chunk) -> tuple[list[Any], BaseException | None]:
        """Return what to give for a finished chunk, and what to raise after it."""
        results, error = chunk.results, None
        if chunk.failed:
            returned = self.on_error == "return"
            for place, result in enumerate(results):
                if isinstance(result, Failure):
                    problem = self.mending.error(chunk, place, result)
                    if not returned:
                        results, error = results[:place], problem
                        break
                    results[place] = problem
        if self._numbered:
            results = list(zip(itertools.count(chunk.start), results, strict=False))
        return results, error

    def _dispatch(self) -> None:
        pool = self.pool
        if pool.paused or self.stopping:
            return
        credits_each = min(self.chunking.credits(), pool.fleet.most_credits)
        while True:
            worker = pool.idlest(credits_each)
            if worker is None:
                return
            chunk = self.retry.popleft() if self.retry else self._next_chunk()
            if chunk is None:
                return
            self._send(worker, chunk)

    def _send(self, worker: int, chunk: Chunk) -> None:
        before = chunk.nbytes
        try:
            self.pool.send(worker, chunk)
        except Exception as error:  # noqa: BLE001 - a user's __reduce__ may do anything
            self.mending.not_sent(chunk, error)
        else:
            if chunk.parent is None:
                self._nbytes += chunk.nbytes - before

    def _next_chunk(self) -> Chunk | None:
        if self.source.exhausted:
            return None
        n_workers = self.pool.fleet.size
        n_items = self.chunking.next_size(self.source.remaining, n_workers)
        if self._limit is not None:
            n_items = min(n_items, self._limit - self._n_items)
        else:
            slow = self.chunking.waits_for_consumer()
            if self._n_chunks >= (FEW_CHUNKS if slow else CHUNKS_PER_WORKER) * n_workers:
                return None
        if self._n_chunks and self.chunking.bytes_per_item:
            left = self.pool.settings.max_bytes - self._nbytes
            n_items = min(n_items, int(left / self.chunking.bytes_per_item))
        if n_items < self.whole:
            return None
        items = self.source.take(n_items, whole=self.whole)
        if not items:
            return None
        chunk = Chunk(self.pool.next_seq(), self._next_index, items, self.number)
        self._next_index += len(items)
        self._n_items += len(items)
        self._n_chunks += 1
        if self._ordered:
            self._queue.append(chunk)
        return chunk

    def _wait(self) -> None:
        pool = self.pool
        waits = [self.mending.next_check_in(), self.source.due_in()]
        timeouts = [wait for wait in waits if wait is not None]
        self._handle(pool.fleet.poll(min(timeouts) if timeouts else None))
        self.mending.check_timeouts()

    def _handle(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, Done):
                chunk = self.pool.arrived(event)
                if chunk is not None and chunk.call == self.number:
                    self._nbytes += self._growth(chunk, event.nbytes)
                    self.chunking.learn(
                        len(chunk.items),
                        event.timing.worked_s,
                        max(event.nbytes, chunk.nbytes),
                    )
                    if event.failed:
                        self.mending.sort_out(chunk, event.results)
                    else:
                        self.finish(chunk, event.results)
            elif isinstance(event, Died):
                self.mending.bury(event)

    @staticmethod
    def _growth(chunk: Chunk, nbytes: int) -> int:
        """Return how many bytes more the results of a chunk take than its items did."""
        if chunk.parent is not None:
            return 0
        growth = nbytes - chunk.nbytes
        chunk.nbytes = nbytes
        return growth

    # -- for mending ---------------------------------------------------------------------------

    def finish(self, chunk: Chunk, results: list[Any], *, failed: bool = False) -> None:
        """Note the results of a chunk, or of a part of one."""
        whole = chunk.parent
        if whole is None:
            chunk.results = results
            chunk.failed |= failed
            self._ready(chunk)
            return
        whole.results[chunk.offset : chunk.offset + len(results)] = results
        whole.failed |= failed
        whole.missing -= 1
        if not whole.missing:
            self._ready(whole)

    def _ready(self, chunk: Chunk) -> None:
        if not self._ordered:
            self._queue.append(chunk)
        if chunk.failed and self.on_error == "raise":
            # Nothing beyond a failure is asked for; what is before it still is.
            self.source.close()
            self.source.exhausted = True
            if not self._ordered:
                self.stopping = True
