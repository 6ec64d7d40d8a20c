"""The run, one pass over an input: chunks of items, their workers, retries, the order of their results."""

import collections
import time
from collections.abc import Container, Sequence
from typing import Any, NamedTuple

from tp_core.errors import TpError

from tp_runner._options import Settings
from tp_runner._scheduling._source import ItemSource
from tp_runner._workers._failure import ITEM, RAISED, RESULT, TIMEOUT, Failure
from tp_runner._workers._fleet import Chunk, Died, Done, Fleet, failure_of_death
from tp_runner._workers._item_errors import failure_to_error
from tp_runner._workers._pickling import explain_not_picklable, short_repr

# -- The retry policy for failed chunks: a pure function of facts ---------------------------------


MOST_DEATHS = 3
"""After this many deaths of workers at work on it, an item is not tried again."""

MOST_DELAYS = 16
"""The longest rest of an item, in multiples of ``retry_delay_s``."""

MOST_FAILED_STARTS = 3
"""After this many ends in a row before it was ready, a worker is not started again."""


class Part(NamedTuple):
    """A range of a chunk's items that is tried again, or has failed for good."""

    start: int  # the place of its first item in the chunk
    stop: int  # the place after its last one
    attempts: int = 0  # how many of the attempts that ``retries`` counts its items have had
    deaths: int = 0  # how many workers its first item has killed
    failure: Failure | None = None  # why it is not tried again; ``None`` when it is
    delay_s: float = 0.0  # after how many seconds it is


class Finish(NamedTuple):
    """Decision: the chunk is done; some of its results are failures."""

    results: list[Any]


class SplitChunk(NamedTuple):
    """Decision: parts of the chunk are handled alone; ``results`` has the results of the other items."""

    parts: list[Part]
    results: list[Any] | None = None


class Resend(NamedTuple):
    """Decision: the chunk is sent again, unchanged."""


Decision = Finish | SplitChunk | Resend


class Death(NamedTuple):
    """The facts of a worker's end."""

    event: Died
    current: tuple[int, int] | None  # the number of the chunk to blame and the place in it; ``None`` for none
    is_timeout: bool  # whether the worker was killed because an item took too long
    is_revived: bool  # whether it was started again
    any_alive: bool  # whether a worker is left, this one included
    held: tuple[int, ...]  # the places in the input of all items of this run that it held


def after_failures(chunk: Chunk, results: list[Any], settings: Settings) -> Decision:
    """Decide about a chunk that came back with failures among its results."""
    first = results[0]
    is_one_failure = isinstance(first, Failure) and all(result is first for result in results)
    if is_one_failure and len(results) > 1 and first.kind in {ITEM, RESULT}:
        # They could not be unpickled together; one by one the culprit shows.
        return SplitChunk(_singles(range(len(results)), chunk.attempts))
    if chunk.attempts < settings.max_retries:
        again = [i for i, r in enumerate(results) if isinstance(r, Failure) and r.kind == RAISED]
        if again:
            parts = _singles(again, chunk.attempts + 1, _delay_s(chunk, settings))
            return SplitChunk(parts, results)
    return Finish(results)


def after_pickling_error(chunk: Chunk, error: BaseException) -> Decision:
    """Decide about a chunk that could not be sent."""
    if len(chunk.items) > 1:
        return SplitChunk(_singles(range(len(chunk.items)), chunk.attempts))
    failure = Failure.of(error, ITEM)
    failure.traceback = ""
    failure.summary = explain_not_picklable(chunk.items[0], "item", error)
    return Finish([failure])


def after_death(chunk: Chunk, death: Death, settings: Settings) -> Decision:
    """Decide about a chunk that a dead worker had been given."""
    n_items = len(chunk.items)
    if not death.any_alive:
        return Finish([death_failure(death)] * n_items)
    if death.current is None or chunk.seq != death.current[0]:
        return Resend()  # another chunk was at work
    # The item to blame, or the batch that it is in: from `start` to `stop`.
    place = death.current[1]
    batch = settings.batching.size if settings.batching else 1
    start = place - place % batch
    stop = min(start + batch, n_items)
    # `chunk.deaths` are those of its first item.
    deaths = 1
    if start == 0:
        deaths += chunk.deaths
    if death.is_timeout or not death.is_revived:
        is_tried_again = chunk.attempts < settings.max_retries
    else:
        is_tried_again = deaths < MOST_DEATHS
    attempts = chunk.attempts + death.is_timeout
    delay_s = _delay_s(chunk, settings) if death.is_timeout else 0.0
    if is_tried_again:
        blamed = Part(start, stop, attempts, deaths, delay_s=delay_s)
        attempts_of_others = attempts
    else:
        blamed = Part(start, stop, attempts, failure=_final_failure(death, deaths, settings), delay_s=delay_s)
        attempts_of_others = chunk.attempts
    parts = [Part(0, start, attempts_of_others), blamed, Part(stop, n_items, attempts_of_others)]
    return SplitChunk([part for part in parts if part.start < part.stop])


def _final_failure(death: Death, deaths: int, settings: Settings) -> Failure:
    """Return the failure of an item that is not tried again after a death."""
    if death.is_timeout:
        failure = Failure(TIMEOUT, f"took longer than timeout_s={settings.timeout_s}")
        failure.worker = death.event.worker
        return failure
    failure = death_failure(death)
    if death.is_revived:
        failure.summary += f"; {deaths} workers died with this item"
    return failure


def death_failure(death: Death) -> Failure:
    failure = failure_of_death(death.event)
    failure.held = death.held
    return failure


def _singles(places: Sequence[int], attempts: int, delay_s: float = 0.0) -> list[Part]:
    return [Part(i, i + 1, attempts, delay_s=delay_s) for i in places]


def _delay_s(chunk: Chunk, settings: Settings) -> float:
    """Return how long an item rests before its next attempt."""
    return settings.retry_delay_s * min(2.0**chunk.attempts, MOST_DELAYS)


# -- Sizes of chunks, and bounds of what is on its way ----------------------------------------

TARGET_S = 2e-3
"""Target for the work of one chunk: some tens of times the cost of its journey."""
FLOOR_S = 2e-4
"""The shortest work of a chunk at the end of the input, where chunks shrink so that workers end together."""
MOST_BYTES = 1 << 20
"""With more, a chunk would no longer stay in the caches of the processor that works on it."""
FEW = 3
"""Up to this many large items still travel together, with at most four times as many bytes, to amortize the
cost of a message."""
MOST_ITEMS = 8192
LONG_S = 5e-3
"""A chunk with more work than this is handed to an idle worker only, or while the end is far."""
JOURNEY_MATTERS_S = 50e-3
"""With more work, half a millisecond of waiting for the next chunk does not matter."""
FAR_FROM_END = 8
"""With this many chunks left for each worker, one behind a slow item is done before the others end."""
SLOW_CONSUMER = 0.9
"""With this share of the time spent by the consumer, larger chunks would gain nothing."""


CHUNKS_PER_WORKER = 16
"""This many chunks may be on their way or waiting for their turn, for each worker: enough to keep the
workers busy while a slow item holds up the results behind it."""
FEW_CHUNKS = 4
"""The same while everybody waits for the consumer."""


class ChunkFlow:
    """The flow of one run: the sizes of its chunks, by the time and size of its items, and its bounds."""

    def __init__(self, settings: Settings, n_workers: int, most_items: int | None = None) -> None:
        # -- The sizes of chunks
        # items travel in multiples of this many: in batches, where there are some
        if settings.batching:
            self.whole = settings.batching.size
        else:
            self.whole = 1
        self.size = self.whole  # how many items the next chunk should have
        # -- What is on its way, or waits for its turn
        self.n_chunks = 0
        self._n_items = 0
        self._nbytes = 0  # of all chunks, and of the results that the consumer has
        self._consumed_nbytes = 0  # the last of these
        # -- Bounds
        self._n_workers = n_workers
        self._max_bytes = settings.max_bytes
        self._limit: int | None = None  # of items; ``None`` to adapt
        most = most_items or MOST_ITEMS
        if settings.queue_scale is not None:
            self._limit = max(int(settings.queue_scale * n_workers), n_workers, self.whole)
            most = min(most, max(1, self._limit // (2 * n_workers)))
        self._most = max(self.whole, most - most % self.whole)  # how many items travel together
        # -- What was measured
        self._item_nbytes = 0.0  # the most that an item took lately
        self._result_nbytes = 0.0  # the most that a result took lately
        self._item_s = 0.0
        self._consumer_s = 0.0  # the time of the consumer since then
        self._since = time.monotonic()

    # -- what is on its way --------------------------------------------------------------------

    def add(self, chunk: Chunk) -> None:
        """Count a new chunk; its size in bytes is unknown before it is sent, as a rule."""
        self._n_items += len(chunk.items)
        self._nbytes += chunk.nbytes
        self.n_chunks += 1

    def remove(self, chunk: Chunk) -> None:
        self._n_items -= len(chunk.items)
        self._nbytes -= chunk.nbytes
        self.n_chunks -= 1

    def give(self, chunk: Chunk) -> Chunk:
        """Count a chunk no more, but its bytes until the consumer comes back."""
        self._n_items -= len(chunk.items)
        self.n_chunks -= 1
        self._consumed_nbytes = chunk.nbytes
        return chunk

    def consumed(self, seconds: float) -> None:
        """Note that the consumer is done with its results, and how long it took."""
        self._nbytes -= self._consumed_nbytes
        self._consumed_nbytes = 0
        if not self._consumer_s:
            self._since = time.monotonic() - seconds
        self._consumer_s += seconds

    def sent(self, chunk: Chunk, nbytes_before: int) -> None:
        """Note the size of a chunk, which is known when it was sent; reserve what its results may take."""
        if chunk.parent is None:
            n_items = len(chunk.items)
            self._item_nbytes = max(chunk.nbytes / n_items, 0.9 * self._item_nbytes)
            chunk.nbytes = max(chunk.nbytes, int(n_items * self._result_nbytes))
            self._nbytes += chunk.nbytes - nbytes_before

    def done(self, chunk: Chunk, worked_s: float, nbytes: int) -> None:
        """Note the time of a finished chunk, and the size of its results."""
        n_items = len(chunk.items)
        if chunk.parent is None:
            self._nbytes += nbytes - chunk.nbytes
            chunk.nbytes = nbytes
        self._result_nbytes = max(nbytes / n_items, 0.9 * self._result_nbytes)
        item_s = worked_s / n_items
        if self._item_s:  # a moving average, from the first chunk on
            item_s = 0.7 * self._item_s + 0.3 * item_s
        self._item_s = item_s
        wanted = min(TARGET_S / max(self._item_s, 1e-9), self._most)
        if largest := max(self._item_nbytes, self._result_nbytes):
            cached = MOST_BYTES / largest
            wanted = min(wanted, max(cached, min(4 * cached, FEW)))
        if wanted < self.size:
            self.size = self._round_size(wanted)
        elif n_items >= self.size:
            self._grow(wanted)

    def _grow(self, wanted: float) -> None:
        now = time.monotonic()
        elapsed = now - self._since
        if self._consumer_s < SLOW_CONSUMER * elapsed:
            self.size = self._round_size(min(2 * self.size, wanted))
        if elapsed > 0.1:  # forget half of the past
            self._since = now - elapsed / 2
            self._consumer_s /= 2

    def _round_size(self, size: float) -> int:
        whole = self.whole
        return max(whole, int(size) - int(size) % whole)

    # -- what may follow -----------------------------------------------------------------------

    def next_size(self, remaining: int | None, most: int | None) -> tuple[int, int]:
        """Return how many items the next chunk may have, 0 for none now, and how many with those read ahead.

        Args:
            remaining: How many the input still has, if that is known.
            most: How many a worker takes at most.
        """
        n_items = self.size
        if remaining is not None:
            fair = max(remaining // (2 * self._n_workers), 1)
            if self._item_s:
                fair = max(fair, int(FLOOR_S / self._item_s))
            n_items = min(n_items, self._round_size(fair))
        if most is not None:
            n_items = min(n_items, max(most, self.whole))
        if self._limit is not None:
            n_items = min(n_items, self._limit - self._n_items)
        else:
            if self._waits_for_consumer():
                chunks_per_worker = FEW_CHUNKS
            else:
                chunks_per_worker = CHUNKS_PER_WORKER
            if self.n_chunks >= chunks_per_worker * self._n_workers:
                return 0, 0
        fitting = 3 * n_items  # two chunks are read ahead
        if largest := max(self._item_nbytes, self._result_nbytes):
            # For each worker one result beyond the bound: or large ones would leave workers idle.
            growth = self._n_workers * max(0.0, self._result_nbytes - self._item_nbytes)
            left = int((self._max_bytes + growth - self._nbytes) / largest)
            # Where nothing is on its way one batch is let through in any case.
            least = 0 if self.n_chunks else self.whole
            fitting = min(fitting, max(left, least))
            n_items = min(n_items, fitting)
        if n_items < self.whole:
            return 0, 0
        return n_items, fitting

    def credits(self, remaining: int | None) -> int:
        """Return how many chunks one worker may have been given at a time, given how many items are left."""
        if self.is_long():
            # Two where the caller asks so rarely that workers would wait for it.
            if self._waits_for_consumer() or self._may_wait(remaining):
                return 2
            return 1
        # Chunks on their way should fit into the processors' caches.
        is_large = max(self._item_nbytes, self._result_nbytes) * self.size > MOST_BYTES / 2
        if is_large or self._item_s * self.size > TARGET_S / 4:
            return 2
        return 3

    def is_long(self) -> bool:
        """Return whether a chunk takes long, or is not measured yet."""
        expected_s = self._item_s * self.size
        return not expected_s or expected_s > LONG_S

    def _waits_for_consumer(self) -> bool:
        """Return whether the consumer takes most of the time, so that workers have time to spare."""
        return self._consumer_s > 0.5 * (time.monotonic() - self._since)

    def _may_wait(self, remaining: int | None) -> bool:
        """Return whether a chunk may wait behind a long one without a later end of the run."""
        if remaining is None or remaining < FAR_FROM_END * self._n_workers * self.size:
            return False
        return 0 < self._item_s * self.size < JOURNEY_MATTERS_S


# -- Chunks that are tried again ----------------------------------------------------------------


class RetryQueue:
    """Chunks to hand out again: some at once, others after a rest."""

    def __init__(self) -> None:
        self._ready: collections.deque[Chunk] = collections.deque()
        self._resting: list[tuple[float, int, Chunk]] = []  # a heap: when each is due, its number, itself
        self._is_hurried = False

    def append(self, chunk: Chunk, delay_s: float = 0.0) -> None:
        """Put a chunk in line, for when ``delay_s`` seconds have passed."""
        if delay_s and not self._is_hurried:
            import heapq  # as below: no start of workers waits for it

            heapq.heappush(self._resting, (time.monotonic() + delay_s, chunk.seq, chunk))
        else:
            self._ready.append(chunk)

    def take(self) -> Chunk | None:
        while self._resting and (self._is_hurried or self._resting[0][0] <= time.monotonic()):
            import heapq

            self._ready.append(heapq.heappop(self._resting)[2])
        if not self._ready:
            return None
        return self._ready.popleft()

    def seconds_until_due(self) -> float | None:
        """Return in how many seconds the next chunk has rested; ``None`` if none rests."""
        if not self._resting:
            return None
        due, _, _ = self._resting[0]
        return max(0.0, due - time.monotonic())

    def hurry(self) -> None:
        """End all rests, and allow no more: a runner that closes does not wait for them."""
        self._is_hurried = True

    def clear(self) -> None:
        self._ready.clear()
        self._resting.clear()


# -- Chunks with the workers ------------------------------------------------------------------

LATE_S = 0.01
"""A worker silent for this long is assumed to be at a slow chunk."""

_NONE = (0, 0)


class Assignments:
    """The chunks of all runs that are with workers."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._inflight: dict[int, tuple[int, Chunk]] = {}  # worker and chunk, by the chunk's number
        self._loads = [0] * fleet.size
        self._n_long = [0] * fleet.size
        self._since = [0.0] * fleet.size  # the last sign of life of those that have something to do
        self._counts: dict[tuple[int, int], tuple[int, int]] = {}  # of a worker and a run: chunks, long ones
        self._seq = 0

    def next_seq(self) -> int:
        self._seq += 1
        return self._seq

    def idlest(self, run: int, most: int) -> int | None:
        """Return the worker with the least to do, if it may be given another chunk of a run."""
        idlest = None
        least = self._fleet.most_credits
        for worker, load in enumerate(self._loads):
            if load < least and self._may_have_more(worker, run, most) and self._fleet.ready(worker):
                idlest = worker
                least = load
        return idlest

    def _may_have_more(self, worker: int, run: int, most: int) -> bool:
        own, own_long = self._counts.get((worker, run), _NONE)
        if own == self._loads[worker]:
            return own < most
        # Behind chunks of other runs only where those are short, and were so far: a stream must not wait for
        # another stream's long item while a worker is free.
        is_late = time.monotonic() - self._since[worker] > LATE_S
        return own < most and own_long == self._n_long[worker] and not is_late

    def send(self, worker: int, chunk: Chunk) -> None:
        chunk.sent += 1  # before the send: a thread worker reads it at once
        if not self._loads[worker]:
            self._since[worker] = time.monotonic()
        self._inflight[chunk.seq] = worker, chunk
        self._count(worker, chunk, 1)
        try:
            self._fleet.send(worker, chunk)
        except BaseException:
            chunk.sent -= 1
            raise

    def withdraw(self, chunk: Chunk) -> None:
        """Forget a chunk of which the sending has raised.

        A signal handler may have raised when it was sent already: what the worker makes of it is dropped.
        """
        if chunk.seq in self._inflight:
            self._remove(chunk.seq)

    def find(self, done: Done) -> Chunk | None:
        """Return the chunk that has come back; ``None`` if nobody knows it any more."""
        return self._inflight.get(done.seq, (0, None))[1]

    def take_finished(self, done: Done) -> None:
        """Note that a chunk is not with its worker any more."""
        self._since[done.worker] = time.monotonic()
        self._remove(done.seq)

    def take_from(self, worker: int) -> list[Chunk]:
        """Return the chunks that a dead worker had been given, in that order."""
        seqs = [seq for seq, (other, _) in self._inflight.items() if other == worker]
        return [self._remove(seq) for seq in seqs]

    def take_all(self) -> list[Chunk]:
        chunks = [chunk for _, chunk in self._inflight.values()]
        self._inflight.clear()
        # An interrupt may have come between two of these.
        self._counts.clear()
        self._loads = [0] * self._fleet.size
        self._n_long = [0] * self._fleet.size
        return chunks

    def _remove(self, seq: int) -> Chunk:
        worker, chunk = self._inflight.pop(seq)
        self._count(worker, chunk, -1)
        return chunk

    def _count(self, worker: int, chunk: Chunk, by: int) -> None:
        key = worker, chunk.run
        n_chunks, n_long = self._counts.pop(key, _NONE)
        n_chunks += by
        n_long += by * chunk.is_long
        if n_chunks:  # runs come and go: no entry stays of those without chunks here
            self._counts[key] = n_chunks, n_long
        self._loads[worker] += by
        self._n_long[worker] += by * chunk.is_long

    def busy(self) -> list[int]:
        return [worker for worker, load in enumerate(self._loads) if load]

    def holders(self, run: int) -> list[int]:
        return [worker for worker in range(len(self._loads)) if (worker, run) in self._counts]

    def busy_with(self, runs: Container[int]) -> set[int]:
        """Return the workers at work on one of some runs: each works on its oldest chunk first."""
        first: dict[int, int] = {}
        for worker, chunk in self._inflight.values():
            first.setdefault(worker, chunk.run)
        return {worker for worker, run in first.items() if run in runs}

    def any_alive(self) -> bool:
        return any(self._fleet.alive(worker) for worker in range(self._fleet.size))


PERIOD_S = 0.1
"""The shortest time between two checks of a worker's memory."""


class Recycling:
    """The limits of each worker's life: its items and memory since its start; it retires in time."""

    def __init__(self, fleet: Fleet, settings: Settings) -> None:
        self._fleet = fleet
        self._most_items = settings.max_items_per_worker
        self._most_bytes = settings.max_memory_per_worker
        self._n_items = [0] * fleet.size
        self._looked = [0.0] * fleet.size

    def left(self, worker: int) -> int | None:
        """Return how many items more a worker may be given; ``None`` for any number."""
        if self._most_items is None:
            return None
        return self._most_items - self._n_items[worker]

    def on_sent(self, worker: int, n_items: int) -> None:
        if self._most_items is not None:
            self._n_items[worker] += n_items
            if self._n_items[worker] >= self._most_items:
                self._fleet.retire(worker)

    def on_done(self, worker: int) -> None:
        """Check the memory of a worker that has finished a chunk."""
        if self._most_bytes is None or time.monotonic() - self._looked[worker] < PERIOD_S:
            return
        self._looked[worker] = time.monotonic()
        nbytes = self._fleet.private_memory(worker)
        if nbytes is not None and nbytes > self._most_bytes:
            self._fleet.retire(worker)

    def on_end(self, worker: int) -> None:
        self._n_items[worker] = 0


def outcome_of(
    chunk: Chunk, devices: Sequence[str], *, raises: bool, numbered: bool
) -> tuple[list[Any], BaseException | None]:
    """Return the results of a finished chunk, ``numbered`` with place and error, and the error to raise."""
    results = chunk.results
    errors: dict[int, BaseException] = {}  # those in place of results
    raised: BaseException | None = None
    if chunk.failed:
        for place, result in enumerate(results):
            if not isinstance(result, Failure):
                continue
            error = failure_to_error(
                result,
                index=chunk.start + place,
                item=short_repr(chunk.items[place]),
                device=devices[result.worker],
                worker=result.worker,
            )
            if raises:
                results = results[:place]
                raised = error
                break
            errors[place] = error
            results[place] = error
    if numbered:
        results = [(chunk.start + i, result, errors.get(i)) for i, result in enumerate(results)]
    return results, raised


class PassState:
    """The state of one pass. It waits for nothing and locks nothing: the scheduler does both."""

    def __init__(
        self,
        source: ItemSource,
        fleet: Fleet,
        assignments: Assignments,
        settings: Settings,
        *,
        number: int,
        ordered: bool,
        numbered: bool,
        on_error: str,
    ) -> None:
        self.number = number
        self._fleet = fleet
        self._assignments = assignments
        self._settings = settings
        self._ordered = ordered
        self._numbered = numbered
        self._on_error = on_error
        # -- Items and chunks
        self.source = source
        self.flow = ChunkFlow(settings, fleet.size, fleet.most_items)
        self.again = RetryQueue()  # chunks to hand out again
        self._queue: collections.deque[Chunk] = collections.deque()  # ordered: all; else finished
        self._next_index = 0
        # -- The end
        self.is_stopping = False
        self._ended_by: TpError | None = None  # from outside
        self._fatal: BaseException | None = None  # a failure after which nothing can follow

    # -- the consumer's side -------------------------------------------------------------------

    def check(self) -> None:
        """Raise the reason why this run was ended from outside, if it was."""
        if self._ended_by is not None:
            raise self._ended_by

    def is_over(self) -> bool:
        """Return whether all results were given."""
        if self._fatal is not None and (not self.flow.n_chunks or not self._ordered):
            raise self._fatal
        if self.flow.n_chunks:
            return False
        if self.source.exhausted and self.source.error is not None:
            raise self.source.error
        return self.source.exhausted

    def has_finished(self) -> bool:
        if not self._queue:
            return False
        if not self._ordered:
            return True
        first = self._queue[0]
        return bool(first.results) and not first.missing

    def awaits_results(self) -> bool:
        """Return whether chunks are on their way, or items may still come from the input."""
        return bool(self.flow.n_chunks or not self.source.exhausted)

    def next_finished(self) -> Chunk | None:
        """Return the next chunk to give, if it has finished."""
        queue = self._queue
        if not queue:
            return None
        if self._ordered:
            if not self.has_finished():
                if self._fatal is not None and not self._assignments.holders(self.number):
                    raise self._fatal
                return None
        elif queue[0].failed and self._on_error == "raise":
            # Others that have finished go first.
            succeeded = next((chunk for chunk in queue if not chunk.failed), None)
            if succeeded is not None:
                queue.remove(succeeded)
                return self.flow.give(succeeded)
        return self.flow.give(queue.popleft())

    def outcome(self, chunk: Chunk) -> tuple[list[Any], BaseException | None]:
        raises = self._on_error == "raise"
        return outcome_of(chunk, self._fleet.devices, raises=raises, numbered=self._numbered)

    def end(self, reason: TpError | None = None) -> None:
        if reason is not None and self._ended_by is None:
            self._ended_by = reason
        self.is_stopping = True
        self._queue.clear()
        self.again.clear()
        self.source.close()

    # -- the workers' side ---------------------------------------------------------------------

    def credits(self) -> int:
        """Return how many of its chunks one worker may have been given at a time."""
        return self.flow.credits(self.source.remaining)

    def next_chunk(self, most: int | None = None) -> Chunk | None:
        """Return the next chunk for a worker, if this run's bounds allow one."""
        return self.again.take() or self._new_chunk(most)

    def _new_chunk(self, most: int | None) -> Chunk | None:
        if self.source.exhausted or self.source.is_reading:
            return None
        n_items, fitting = self.flow.next_size(self.source.remaining, most)
        if not n_items:
            return None
        items = self.source.take(n_items, whole=self.flow.whole, fitting=fitting)
        if not items:
            return None
        chunk = Chunk(self._assignments.next_seq(), self._next_index, items, self.number)
        chunk.is_long = self.flow.is_long()
        self._next_index += len(items)
        self.flow.add(chunk)
        if self._ordered:
            self._queue.append(chunk)
        return chunk

    def on_done(self, chunk: Chunk, done: Done) -> None:
        self.flow.done(chunk, done.timing.worked_s, done.nbytes)
        if not done.failed:
            self._finish(chunk, done.results, failed=False)
            return
        for result in done.results:
            if isinstance(result, Failure):
                result.worker = done.worker
        self._apply(chunk, after_failures(chunk, done.results, self._settings))

    def on_pickling_error(self, chunk: Chunk, error: BaseException) -> None:
        self._apply(chunk, after_pickling_error(chunk, error))

    def on_worker_death(self, chunks: list[Chunk], death: Death) -> None:
        indices = tuple(chunk.start + i for chunk in chunks for i in range(len(chunk.items)))
        current = death.current
        if current is None and chunks and not death.is_revived and self._on_error == "raise":
            current = chunks[0].seq, 0
        death = death._replace(current=current, held=indices)
        for chunk in chunks:
            self._apply(chunk, after_death(chunk, death, self._settings))
        if not death.any_alive:
            failure = death_failure(death)
            failure.summary += "; no worker is left"
            first = indices[0] if indices else None
            self._fail(failure, index=first)

    def on_failed_start(self, chunks: list[Chunk], died: Died, failure: Failure) -> None:
        """Fail the run: a worker could not be started again."""
        failure.worker = died.worker
        for chunk in chunks:
            self._apply(chunk, Finish([failure] * len(chunk.items)))
        self._fail(failure, index=None)

    def _fail(self, failure: Failure, *, index: int | None) -> None:
        self.is_stopping = True
        if self._fatal is None:
            device = self._fleet.devices[failure.worker]
            self._fatal = failure_to_error(failure, index=index, device=device, worker=failure.worker)

    # -- decisions -----------------------------------------------------------------------------

    def _apply(self, chunk: Chunk, decision: Decision) -> None:
        if isinstance(decision, Finish):
            self._finish(chunk, decision.results, failed=True)
        elif isinstance(decision, SplitChunk):
            self._split(chunk, decision)
        else:
            self.again.append(chunk)

    def _split(self, chunk: Chunk, split: SplitChunk) -> None:
        """Queue parts of a chunk again; parts of parts belong to the whole chunk."""
        if not self._ordered:
            self._scatter(chunk, split)
            return
        if chunk.parent is None:
            whole = chunk
            base = 0
            whole.results = split.results or [None] * len(chunk.items)
        else:
            whole = chunk.parent
            base = chunk.offset
            whole.missing -= 1
            if split.results is not None:
                whole.results[base : base + len(split.results)] = split.results
        whole.missing += len(split.parts)
        again = {i for part in split.parts for i in range(part.start, part.stop)}
        for i, result in enumerate(split.results or ()):
            if isinstance(result, Failure) and i not in again:
                whole.failed = True
        for part in split.parts:
            piece = self._piece(chunk, part)
            piece.parent = whole
            piece.offset = base + part.start
            self._send_or_fail(piece, part)

    def _scatter(self, chunk: Chunk, split: SplitChunk) -> None:
        """Make a chunk of each part: without an order, no result waits for another one."""
        self.flow.remove(chunk)
        at = 0
        n_items = len(chunk.items)
        for part in (*split.parts, Part(n_items, n_items)):
            if at < part.start and split.results is not None:  # those before it have their results
                results = split.results[at : part.start]
                done = self._piece(chunk, Part(at, part.start))
                done.nbytes = chunk.nbytes * len(results) // n_items
                self.flow.add(done)
                failed = any(isinstance(result, Failure) for result in results)
                self._finish(done, results, failed=failed)
            if part.start < part.stop:
                piece = self._piece(chunk, part)
                self.flow.add(piece)
                self._send_or_fail(piece, part)
            at = part.stop

    def _piece(self, chunk: Chunk, part: Part) -> Chunk:
        items = chunk.items[part.start : part.stop]
        return Chunk(
            self._assignments.next_seq(),
            chunk.start + part.start,
            items,
            chunk.run,
            attempts=part.attempts,
            deaths=part.deaths,
            sent=chunk.sent,
        )

    def _send_or_fail(self, piece: Chunk, part: Part) -> None:
        if part.failure is None:
            self.again.append(piece, part.delay_s)
        else:
            self._finish(piece, [part.failure] * len(piece.items), failed=True)

    def _finish(self, chunk: Chunk, results: list[Any], *, failed: bool) -> None:
        """Note the results of a chunk, or of a part of one."""
        whole = chunk.parent or chunk
        whole.failed |= failed
        if whole is chunk:
            chunk.results = results
        else:
            whole.results[chunk.offset : chunk.offset + len(results)] = results
            whole.missing -= 1
            if whole.missing:
                return
        if not self._ordered:
            self._queue.append(whole)
        if whole.failed and self._on_error == "raise":
            # No new items after a failure; results before it still come.
            self.source.close()
            self.source.exhausted = True
            if not self._ordered:
                self.is_stopping = True
