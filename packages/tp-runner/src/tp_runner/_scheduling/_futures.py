"""Items that come one by one, from any thread, each with a future of its result."""

import collections
import copy
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from tp_core.errors import TpError

from tp_runner._scheduling._source import Source
from tp_runner.errors import RunnerClosedError, WorkerDiedError, rebuild_error

__all__ = ["Submissions", "Ticket", "settle"]


class Ticket(NamedTuple):
    """A future, and whether it raises what the work raised instead of an error about it."""

    future: "Future[Any]"
    raise_original: bool = False


def settle(ticket: Ticket, result: Any, error: BaseException | None) -> None:
    """Give a future its result, or the error that stands in its place."""
    future = ticket.future
    if error is not None and ticket.raise_original and error.__cause__ is not None:
        original, error.__cause__ = error.__cause__, None
        original.__cause__ = error  # the text has the chain below it
        future.set_exception(original)
    elif error is not None:
        fail(ticket, error)
    else:
        future.set_result(result)


def fail(ticket: Ticket, error: BaseException) -> None:
    """Give a future our own error; a death is what those of ``concurrent.futures`` raise, too."""
    if ticket.raise_original and isinstance(error, WorkerDiedError):
        from concurrent.futures.process import BrokenProcessPool

        error = rebuild_error(WorkerDiedError, BrokenProcessPool, error.args, error.__dict__)
    ticket.future.set_exception(error)


class Submissions(Source):
    """The input of a run that ends when it is told to; its items are submitted.

    Items are put in line and taken by those who hold the pool's lock.

    Args:
        max_wait_s: How long an incomplete batch waits for more items; by default it goes at once.

    Attributes:
        is_finishing: Whether nothing more may be submitted.
        on_end: Called in its thread when the last future is done.
        hurry: Has what rests before it is tried again go at once.
    """

    def __init__(self, max_wait_s: float | None) -> None:
        self._max_wait_s = max_wait_s or 0.0
        self._line: collections.deque[tuple[Any, Ticket]] = collections.deque()
        self._open: dict[int, Ticket] = {}
        self._n_taken = 0
        self._oldest = 0.0
        self._thread: threading.Thread | None = None
        self.is_finishing = False
        self.on_end: Callable[[], None] | None = None
        self.hurry: Callable[[], None] = lambda: None

    def submit(self, item: Any, *, raise_original: bool) -> "Future[Any]":
        """Put an item in line."""
        future: Future[Any] = Future()
        if not self._line:
            self._oldest = time.monotonic()
        self._line.append((item, Ticket(future, raise_original)))
        return future

    def has_open(self) -> bool:
        """Whether a future that was given out is not done yet."""
        return bool(self._line or self._open)

    def has_line(self) -> bool:
        """Whether an item is still waiting to be handed out."""
        return bool(self._line)

    def take(self, n_items: int, *, whole: int = 1) -> list[Any]:
        n_there = min(len(self._line), n_items)
        if n_there % whole and not self.is_finishing and self.due_in():
            n_there -= n_there % whole
        items: list[Any] = []
        while self._line and len(items) < n_there:
            item, ticket = self._line.popleft()
            if ticket.future.set_running_or_notify_cancel():
                self._open[self._n_taken] = ticket
                self._n_taken += 1
                items.append(item)
        if items:
            self._oldest = time.monotonic()
        self.exhausted = self.is_finishing and not self._line
        return items

    def due_in(self) -> float | None:
        if not self._line or not self._max_wait_s:
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
                while outcomes:  # nothing here may keep a result that its receiver has dropped
                    index, result, error = outcomes.pop()
                    settle(self._open.pop(index), result, error)
                    del result, error
        except BaseException as error:  # noqa: BLE001 - it belongs to those who wait
            self.abandon(error)
        else:
            self.abandon(RunnerClosedError("the runner was closed before this item was done"))
        if self.on_end is not None:
            self.on_end()

    def abandon(self, error: BaseException) -> None:
        """End; who waits gets ``error``, each a copy: raising an exception writes on it."""
        self.is_finishing = self.exhausted = True
        while self._line:
            _, ticket = self._line.popleft()
            if ticket.future.set_running_or_notify_cancel():
                fail(ticket, _copied(error))
        while self._open:
            _, ticket = self._open.popitem()
            fail(ticket, _copied(error))

    def cancel_line(self) -> None:
        """Cancel what no worker has been given yet."""
        for _, ticket in self._line:
            ticket.future.cancel()

    def join(self) -> None:
        """Wait for the thread, unless this is the thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _copied(error: BaseException) -> BaseException:
    return copy.copy(error) if isinstance(error, TpError) else error
