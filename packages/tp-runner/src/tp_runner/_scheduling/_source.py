"""The input: read in the caller's thread where reading cannot block, in a thread of its own elsewhere.

Submitted items are an input, too, with a future for each.
"""

import abc
import collections
import contextvars
import copy
import itertools
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple, Protocol, TypeVar

from tp_core.errors import TpError

from tp_runner._workers._failure import raised_by_signal_handler
from tp_runner.errors import RunnerClosedError, WorkerDiedError, rebuild_error

T_co = TypeVar("T_co", covariant=True)


class MapStyle(Protocol[T_co]):
    """A dataset with a length and places, as in torch: it need not be iterable."""

    def __len__(self) -> int: ...
    def __getitem__(self, place: int, /) -> T_co: ...


# Inputs that cannot block, which Direct reads without a thread.
_SIZED = (list, tuple, range, dict, set, frozenset, bytes, str, collections.deque)
_INSTANT = (
    *(type(iter(kind())) for kind in (list, tuple, set, dict, bytes, str)),
    type(iter(range(0))),
    type({}.keys()),
    type({}.values()),
    type({}.items()),
    itertools.repeat,
    itertools.count,
)
_INSTANT_OF_OTHERS = {("numpy", "ndarray"), ("sqlite3", "Cursor")}
"""Types of packages that are not imported here: arrays, and cursors, which only their own thread may read."""

OTHER_THREAD = (
    "the input is read in a thread of its own, so that results flow while it waits: open what belongs to one "
    "thread inside the generator that is handed over, or hand over the cursor itself"
)


class ItemSource(abc.ABC):
    """The source of a run's items."""

    remaining: int | None = None  # how many are left; ``None`` when nobody knows
    exhausted = False  # whether there will be no more
    error: BaseException | None = None  # the error of reading them; there are no more after it
    is_reading = False  # whether it is being read in this thread: the input may use the runner that reads it

    @abc.abstractmethod
    def take(self, n_items: int, *, whole: int = 1, fitting: int) -> list[Any]:
        """Return up to ``n_items`` that are there now; as many as a multiple of ``whole`` allows.

        An incomplete batch is returned when no more items will come, or after ``max_wait_s``.

        Args:
            n_items: This many at most, and at least ``whole``.
            whole: The size of a batch.
            fitting: This many may be returned and read ahead together.
        """

    def seconds_until_due(self) -> float | None:
        """Return in how many seconds an incomplete batch must go; ``None`` if there is none."""
        return None

    def close(self) -> None:  # noqa: B027 - most have nothing to do
        """Read no more."""


class Direct(ItemSource):
    """Input that is read in the caller's thread."""

    def __init__(self, items: Iterable[Any]) -> None:
        self._iterator = iter(items)
        if isinstance(items, _SIZED):
            self.remaining = len(items)

    def take(self, n_items: int, *, whole: int = 1, fitting: int) -> list[Any]:  # noqa: ARG002 - it reads no further
        items: list[Any] = []
        wanted = n_items - n_items % whole
        self.is_reading = True
        try:
            items.extend(itertools.islice(self._iterator, wanted))
        except Exception as error:
            if raised_by_signal_handler(error):  # and not by the input
                raise
            self.error = error  # raised in the caller, after the results
        finally:
            self.is_reading = False
        if len(items) < wanted:
            self.exhausted = True
        if self.remaining is not None:
            self.remaining -= len(items)
        return items


class Feeder(ItemSource):
    """Input that is read in a thread, so that results flow while it blocks."""

    def __init__(
        self, items: Iterable[Any], wake: Callable[[], None], max_wait_s: float | None = None
    ) -> None:
        self.remaining = length_of(items)
        self._items = items
        self._wake = wake
        self._max_wait_s = max_wait_s
        self._buffer: collections.deque[Any] = collections.deque()
        self._wanted = 0
        # The deque needs no lock, as its appends and pops are atomic; the reader sleeps here when it is full.
        # Reentrant: a signal handler may close the stream in the thread that holds it.
        self._more = threading.Condition(threading.RLock())
        self._hungry = False
        self._ended = False
        self._closed = False
        self._oldest: float | None = None
        # The input sees the caller's context variables, as it does in the caller's thread.
        run = contextvars.copy_context().run
        self._thread = threading.Thread(target=run, args=(self._read,), name="tp-runner-feeder", daemon=True)
        self._started = False

    def take(self, n_items: int, *, whole: int = 1, fitting: int) -> list[Any]:
        if not self._started:
            self._start()
        buffer = self._buffer
        ended = self._ended  # read before the buffer: the reader sets it after the last item
        n_there = min(len(buffer), n_items)
        n_taken = n_there - n_there % whole
        if n_taken < n_there and (ended or self.seconds_until_due() == 0.0):
            n_taken = n_there
        self._want(min(2 * n_items, fitting - n_taken))
        if not n_taken:
            self._hungry = True
            if ended and not buffer:
                self.exhausted = True
            elif len(buffer) >= whole or (self._ended and buffer):
                return self.take(n_items, whole=whole, fitting=fitting)  # they came without a wake
            return []
        pop = buffer.popleft
        items = [pop() for _ in range(n_taken)]
        self._oldest = time.monotonic() if buffer else None
        if self.remaining is not None:
            self.remaining = max(0, self.remaining - n_taken)
        return items

    def seconds_until_due(self) -> float | None:
        if self._max_wait_s is None or not self._buffer:
            return None
        if self._oldest is None:  # an item came while the last one was taken, and its time was not noted
            self._oldest = time.monotonic()
        return max(0.0, self._oldest + self._max_wait_s - time.monotonic())

    def _start(self) -> None:
        self._started = True
        try:
            self._thread.start()
        except RuntimeError as error:  # the system starts no more threads
            self.error, self._ended = error, True

    def _want(self, n_items: int) -> None:
        if self._wanted != n_items or len(self._buffer) < n_items:
            with self._more:
                self._wanted = n_items
                self._more.notify()

    def _read(self) -> None:
        buffer = self._buffer
        iterator: Iterator[Any] = iter(())
        item: Any = None
        try:
            iterator = iter(self._items)
            for item in iterator:
                if not buffer:
                    self._oldest = time.monotonic()
                buffer.append(item)
                if self._hungry:
                    self._hungry = False
                    self._wake_reader()
                if len(buffer) >= self._wanted:
                    with self._more:
                        self._more.wait_for(lambda: self._closed or len(buffer) < self._wanted)
                if self._closed:
                    break
        except BaseException as error:  # noqa: BLE001 - raised in the caller, whatever it is
            self.error = error
            if type(error).__module__ == "sqlite3" and "thread" in str(error):
                error.add_note(OTHER_THREAD)
        finally:
            item = None
            self._ended = True
            if self._closed and hasattr(iterator, "close"):
                iterator.close()
            self._wake_reader()

    def _wake_reader(self) -> None:
        # With the lock: after close() the workers' pipe may be closed, and its number another file's.
        with self._more:
            if not self._closed:
                self._wake()

    def close(self) -> None:
        with self._more:
            self._closed = True
            self._more.notify()


def open_source(
    items: Iterable[Any], wake: Callable[[], None], *, direct: bool, max_wait_s: float | None
) -> ItemSource:
    """Return what reads ``items``; ``direct`` forbids a thread."""
    items = as_iterable(items)
    if direct or type(items) in _SIZED or type(items) in _INSTANT or _name(items) in _INSTANT_OF_OTHERS:
        return Direct(items)
    return Feeder(items, wake, max_wait_s)


def as_iterable(items: Any) -> Iterable[Any]:
    """Return an iterable over items; a dataset without an iterator is read by its length.

    Python would read such a dataset until it raises IndexError, which most never do.
    """
    if hasattr(items, "__iter__") or not (hasattr(items, "__len__") and hasattr(items, "__getitem__")):
        return items  # type: ignore[no-any-return]  # whatever it is: iter() says it if it is none
    return _ByLength(items)


class _ByLength:
    def __init__(self, items: MapStyle[Any]) -> None:
        self._items = items

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return (self._items[place] for place in range(len(self._items)))


def _name(items: Any) -> tuple[str, str]:
    return type(items).__module__, type(items).__name__


def length_of(items: Any) -> int | None:
    try:
        return len(items)
    except (TypeError, NotImplementedError):
        return None


# -- Submitted items and their futures --------------------------------------------------------


class Ticket(NamedTuple):
    """A future; with ``raise_original`` it raises the work's own error, with ours as its cause."""

    future: "Future[Any]"
    raise_original: bool = False


def settle(ticket: Ticket, result: Any, error: BaseException | None) -> None:
    """Give a future its result, or its error."""
    future = ticket.future
    if error is not None and ticket.raise_original and error.__cause__ is not None:
        original, error.__cause__ = error.__cause__, None
        original.__cause__ = error  # its text has the chain of causes
        future.set_exception(original)
    elif error is not None:
        fail(ticket, error)
    else:
        future.set_result(result)


def fail(ticket: Ticket, error: BaseException) -> None:
    """Give a future our own error; a death is also the error of ``concurrent.futures`` for it."""
    if ticket.raise_original and isinstance(error, WorkerDiedError):
        from concurrent.futures.process import BrokenProcessPool

        error = rebuild_error(WorkerDiedError, BrokenProcessPool, error.args, error.__dict__)
    ticket.future.set_exception(error)


class Submissions(ItemSource):
    """The input of the run of submitted items, until somebody ends it.

    Items are put in line and taken under the pool's lock.
    """

    def __init__(self, lock: "threading.RLock", max_wait_s: float | None) -> None:
        self._lock = lock
        self._max_wait_s = max_wait_s or 0.0
        self._pending: collections.deque[tuple[Any, Ticket]] = collections.deque()
        self._open: dict[int, Ticket] = {}
        self._n_taken = 0
        self._oldest = 0.0
        self._thread: threading.Thread | None = None
        self.is_finishing = False  # whether nothing more may be submitted
        self.on_end: Callable[[], None] | None = None  # called in its thread when the last future is done
        # hands out resting items at once, before their delay is over
        self.hurry: Callable[[], None] = lambda: None

    def submit(self, item: Any, *, raise_original: bool) -> "Future[Any]":
        future: Future[Any] = Future()
        if not self._pending:
            self._oldest = time.monotonic()
        self._pending.append((item, Ticket(future, raise_original)))
        return future

    def has_open(self) -> bool:
        return bool(self._pending or self._open)

    def has_pending(self) -> bool:
        return bool(self._pending)

    def take(self, n_items: int, *, whole: int = 1, fitting: int) -> list[Any]:  # noqa: ARG002 - all are there
        n_there = min(len(self._pending), n_items)
        if n_there % whole and not self.is_finishing and self.seconds_until_due():
            n_there -= n_there % whole
        items: list[Any] = []
        while self._pending and len(items) < n_there:
            item, ticket = self._pending.popleft()
            if ticket.future.set_running_or_notify_cancel():
                self._open[self._n_taken] = ticket
                self._n_taken += 1
                items.append(item)
        if items:
            self._oldest = time.monotonic()
        self.exhausted = self.is_finishing and not self._pending
        return items

    def seconds_until_due(self) -> float | None:
        if not self._pending or not self._max_wait_s:
            return None
        return max(0.0, self._oldest + self._max_wait_s - time.monotonic())

    def serve(self, steps: Iterator[list[Any]]) -> None:
        """Settle futures in a thread of their own, by the results of a run over this input."""
        self._thread = threading.Thread(
            target=self._settle_all, args=(steps,), name="tp-runner-futures", daemon=True
        )
        self._thread.start()

    def _settle_all(self, steps: Iterator[list[Any]]) -> None:
        try:
            for outcomes in steps:
                outcomes.reverse()
                while outcomes:  # one by one: no variable may keep a result that its receiver has dropped
                    index, result, error = outcomes.pop()
                    settle(self._open.pop(index), result, error)
                    del result, error
        except BaseException as error:  # noqa: BLE001 - the futures raise it
            self.abandon(error)
        else:
            self.abandon(RunnerClosedError("the runner was closed before this item was done"))
        if self.on_end is not None:
            self.on_end()

    def abandon(self, error: BaseException) -> None:
        """End; each open future gets a copy of ``error``, as raising an exception writes on it."""
        # Not between a submit's look at is_finishing and its item, or nobody would settle its future. Below,
        # without the lock: the futures' callbacks may wait for other threads.
        with self._lock:
            self.is_finishing = self.exhausted = True
        while self._pending:
            _, ticket = self._pending.popleft()
            if ticket.future.set_running_or_notify_cancel():
                fail(ticket, _copy_of(error))
        while self._open:
            _, ticket = self._open.popitem()
            fail(ticket, _copy_of(error))

    def cancel_pending(self) -> None:
        """Cancel the items that no worker has yet."""
        for _, ticket in tuple(self._pending):  # abandon() may take them at the same time
            ticket.future.cancel()

    def join(self) -> None:
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _copy_of(error: BaseException) -> BaseException:
    if isinstance(error, TpError):
        return copy.copy(error)
    return error
