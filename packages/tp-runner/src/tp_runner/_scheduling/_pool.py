"""The pool of running workers: streams, submitted items, pauses, the end.

Any number of runs are open at a time: streams, asynchronous streams, and one for all submitted items.
They take turns in :mod:`._scheduler`.
"""

import collections
import contextlib
import copy
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Any, NamedTuple

from tp_core.errors import ConfigError, TpError
from tp_core.plugins import Pool

from tp_runner._options import Settings
from tp_runner._scheduling._run import Run
from tp_runner._scheduling._scheduler import Scheduler
from tp_runner._scheduling._source import Source, open_source
from tp_runner._stats import RunnerStats, StatsCollector
from tp_runner._stream import FORKED, OpenRun, ResultStream
from tp_runner._workers._fleet import Fleet, watch
from tp_runner.errors import RunCancelledError, RunnerClosedError, WorkerDiedError, rebuild_error

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


class Submissions(Source):
    """The input of the run of submitted items, until somebody ends it.

    Items are put in line and taken under the pool's lock.

    Args:
        lock: The pool's.
        max_wait_s: How long an incomplete batch waits for more items; by default it goes at once.

    Attributes:
        is_finishing: Whether nothing more may be submitted.
        on_end: Called in its thread when the last future is done.
        hurry: Hands out resting items at once, before their delay is over.
    """

    def __init__(self, lock: "threading.RLock", max_wait_s: float | None) -> None:
        self._lock = lock
        self._max_wait_s = max_wait_s or 0.0
        self._pending: collections.deque[tuple[Any, Ticket]] = collections.deque()
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
        if not self._pending:
            self._oldest = time.monotonic()
        self._pending.append((item, Ticket(future, raise_original)))
        return future

    def has_open(self) -> bool:
        """Return whether a future that was given out is not done yet."""
        return bool(self._pending or self._open)

    def has_pending(self) -> bool:
        """Return whether an item is still waiting to be handed out."""
        return bool(self._pending)

    def take(self, n_items: int, *, whole: int = 1) -> list[Any]:
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
        # Not between a submit's look at is_finishing and its item, whose future nobody would settle. Below,
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
        for _, ticket in tuple(self._pending):  # abandon() may take them meanwhile
            ticket.future.cancel()

    def join(self) -> None:
        """Wait for the thread, unless this is the thread."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()


def _copy_of(error: BaseException) -> BaseException:
    return copy.copy(error) if isinstance(error, TpError) else error


class RunnerPool(Pool):
    """A fleet of workers, and the runs that take turns on it.

    Args:
        fleet: The workers; they are started.
        settings: How the runner is run.
        wait: Whether to wait until all of them are ready, and raise why one is not. Otherwise the first
            run does so, and meanwhile uses those that are.
    """

    def __init__(self, fleet: Fleet, settings: Settings, *, wait: bool = True) -> None:
        self.fleet = fleet
        self.settings = settings
        self._submissions: Submissions | None = None
        self._is_dropped = False  # no new runs or items are accepted
        self._is_closing = False
        self._owner = os.getpid()
        try:
            self._scheduler = Scheduler(fleet, settings, wait=wait)
        except BaseException:
            fleet.close(timeout_s=0.0)
            raise
        self._lock = self._scheduler.lock
        watch(self)

    def __exit__(self, *raised: object) -> None:
        self.close(timeout_s=None if raised[0] is None else 0.0)

    # -- runs ----------------------------------------------------------------------------------

    def run(self, items: Iterable[Any], *, ordered: bool | None = None) -> ResultStream[Any]:
        """Return an iterator over the result of each item, in the items' order or as they come.

        Items are read lazily, and only so far ahead as the workers need. Closing the iterator early
        leaves the pool usable. Several iterators take turns on the workers.

        Raises:
            RunnerClosedError: The pool is closed.
        """
        return ResultStream(self.open_run(items, ordered=ordered))

    def open_run(self, items: Iterable[Any], *, ordered: bool | None = None) -> OpenRun:
        """Return the run of :meth:`run` as lists of neighboring results, with functions that end it.

        Raises:
            RunnerClosedError: The pool is closed.
        """
        self._require_open()
        settings = self.settings
        opened: list[Run] = []
        ended: list[str] = []  # perhaps before the run is opened, by the first result

        def open_one() -> Run:
            source = open_source(
                items, self.fleet.wake, direct=self.fleet.direct, max_wait_s=settings.max_wait_s
            )
            run = self._new_run(source, ordered=settings.ordered if ordered is None else ordered)
            opened.append(run)
            if ended:
                self._end_runs(opened, ended[0])
            return run

        steps = self._scheduler.steps(open_one)

        def end() -> None:
            ended.append("this stream was closed")
            self._end_runs(opened, ended[0])
            with contextlib.suppress(ValueError):  # another thread reads it, and notices
                steps.close()

        def cancel(kill_after_s: float | None) -> None:
            ended.append("this stream was cancelled")
            self._end_runs(opened, ended[0], kill_after_s)

        return OpenRun(steps, end, cancel, self.stats)

    def _end_runs(self, runs: list[Run], reason: str, kill_after_s: float | None = None) -> None:
        self._require_killable(kill_after_s)
        if self._owner != os.getpid():
            return  # the runs and the lock belong to another process
        with self._lock:
            for run in runs:
                self._scheduler.end_run(run, RunCancelledError(reason))
        if kill_after_s is not None:
            self._scheduler.kill_busy(runs, kill_after_s)

    def _require_killable(self, kill_after_s: float | None) -> None:
        if kill_after_s is None:
            return
        if not self.fleet.can_kill:
            msg = (
                f"kill_after_s={kill_after_s!r} needs workers that are processes: these are threads, which "
                "nobody can kill; let the work look at tp_runner.item().cancelled"
            )
            raise ConfigError(msg)
        if not isinstance(kill_after_s, int | float) or not 0 <= kill_after_s < math.inf:
            msg = f"kill_after_s must be a number of seconds, 0 or more, got {kill_after_s!r}"
            raise ConfigError(msg)

    def _new_run(
        self, source: Source, *, ordered: bool, numbered: bool = False, on_error: str | None = None
    ) -> Run:
        with self._lock:
            self._require_open()
            return self._scheduler.new_run(source, ordered=ordered, numbered=numbered, on_error=on_error)

    # -- from other threads --------------------------------------------------------------------

    def submit(self, item: Any, *, raise_original: bool = False) -> "Future[Any]":
        """Return a future of the result of one item.

        Args:
            item: The item.
            raise_original: Whether the future raises what the work raised, where it could travel, with
                our error as its cause, and not the other way around.

        Raises:
            RunnerClosedError: The pool is closed.
        """
        if self.fleet.direct:
            return self._submit_inline(item, raise_original=raise_original)
        self._require_owner()
        with self._lock:
            self._require_open()
            submissions = self._submissions
            if submissions is None or submissions.is_finishing:
                submissions = Submissions(self._lock, self.settings.max_wait_s)
                run = self._new_run(submissions, ordered=False, numbered=True, on_error="return")
                submissions.hurry = run.again.hurry
                try:
                    submissions.serve(self._scheduler.steps(lambda: run))
                except BaseException:  # the system starts no more threads
                    self._scheduler.end_run(run)
                    raise
                self._submissions = submissions  # not before: a failed start must leave no future open
            future = submissions.submit(item, raise_original=raise_original)
            self._scheduler.dispatch()
            if self.settings.timeout_s is not None or self.settings.max_wait_s is not None:
                self._scheduler.wake_all()  # the waiting thread may have to wake up earlier now
            return future

    def cancel_submitted(self) -> None:
        """Cancel the futures of items that no worker has yet."""
        with self._lock:
            if self._submissions is not None:
                self._submissions.cancel_pending()

    def _submit_inline(self, item: Any, *, raise_original: bool) -> "Future[Any]":
        future: Future[Any] = Future()
        ticket = Ticket(future, raise_original)
        source = open_source([item], self.fleet.wake, direct=True, max_wait_s=None)
        run = self._new_run(source, ordered=False, numbered=True, on_error="return")
        for outcomes in self._scheduler.steps(lambda: run):
            for _, result, error in outcomes:
                settle(ticket, result, error)
        return future

    def pause(self) -> None:
        """Hand out no more items until :meth:`resume`; items on their way still give results."""
        self._scheduler.is_paused = True

    def resume(self) -> None:
        """Hand out items again."""
        self._require_owner()
        with self._lock:
            self._scheduler.is_paused = False
            self._scheduler.dispatch()
            self._scheduler.wake_all()

    def cancel(self, kill_after_s: float | None = None) -> None:
        """End every stream, as :meth:`ResultStream.cancel` ends one."""
        self._require_owner()
        runs = [run for run in self._scheduler.runs.copy() if not isinstance(run.source, Submissions)]
        self._end_runs(runs, "the call was cancelled", kill_after_s)

    def stats(self) -> RunnerStats:
        """Return the workers' statistics so far."""
        return self._scheduler.collector.snapshot(self.fleet.where)

    def exit_results(self) -> list[Any]:
        """Return the values of the workers' ends so far, by worker."""
        return self.fleet.exit_results()

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write what each worker did when, in the Chrome trace format.

        Raises:
            ConfigError: The pool was opened without ``timeline=True``.
        """
        self._timeline_collector().write_timeline(path)

    def draw_timeline(self, width: int = 72) -> str:
        """Return a picture in text of how busy each worker was when.

        Raises:
            ConfigError: The pool was opened without ``timeline=True``.
        """
        return self._timeline_collector().draw_timeline(width)

    def _timeline_collector(self) -> StatsCollector:
        if not self.settings.timeline:
            msg = "nothing was kept for a timeline; open the runner with timeline=True"
            raise ConfigError(msg)
        return self._scheduler.collector

    # -- the end -------------------------------------------------------------------------------

    def close(self, *, timeout_s: float | None = None) -> None:
        """Finish the submitted items, end all streams and the workers; a second call does nothing.

        Args:
            timeout_s: How long the workers may take over their end, by default ``end_timeout_s``; 0 ends
                everything at once, and futures that are not done get ``RunnerClosedError``.
        """
        timeout_s = self.settings.end_timeout_s if timeout_s is None else timeout_s
        if self._owner != os.getpid():
            return
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            submissions = self._submissions
        if submissions is not None and timeout_s > 0:
            self._finish(submissions)
            submissions.join()
        self._scheduler.close(lambda: RunnerClosedError("this runner was closed"), timeout_s=timeout_s)
        if submissions is not None:
            submissions.join()

    def stop(self) -> None:
        """End the workers at once."""
        self.close(timeout_s=0.0)

    def drop(self) -> None:
        """End the workers after the submitted items; nobody else will use the pool."""
        # `_is_closing` first: a runner may be collected after the program's end, when `os` has no names.
        if self._is_closing or self._owner != os.getpid():
            return
        with self._lock:
            self._is_dropped = True
            submissions = self._submissions
            if submissions is not None and submissions.has_open():
                submissions.on_end = self.stop
        if submissions is None or submissions.on_end is None:
            self.stop()
        else:
            self._finish(submissions)

    def at_exit(self) -> None:
        """Finish the submitted items, as ``concurrent.futures`` does at the end of a program."""
        try:
            if self._owner == os.getpid() and self._submissions is not None:
                self._finish(self._submissions)
                self._submissions.join()
        finally:
            self.stop()

    def _finish(self, submissions: Submissions) -> None:
        with self._lock:
            submissions.is_finishing = True
            submissions.hurry()
            submissions.exhausted = not submissions.has_pending()
            self._scheduler.is_paused = False
            self._scheduler.dispatch()
            self._scheduler.wake_all()

    @property
    def closed(self) -> bool:
        """``True`` after :meth:`close` or :meth:`drop`."""
        return self._is_closing or self._is_dropped

    def _require_owner(self) -> None:
        # Before the lock: a thread that this forked copy lacks may have held it, and nobody would release it.
        if self._owner != os.getpid() and not self.fleet.direct:
            raise RunnerClosedError(FORKED.format(owner=self._owner))

    def _require_open(self) -> None:
        self._require_owner()
        if self._is_closing or self._is_dropped:
            msg = "this runner is closed; activate() starts it again"
            raise RunnerClosedError(msg)
