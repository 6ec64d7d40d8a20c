"""Workers that are running, and the runs that share them.

Any number of runs are open at a time: streams, asynchronous streams, and one for everything that is
submitted. There is no thread that schedules: whoever waits for results hands out chunks and takes in
answers for all. One of those who wait sleeps on the workers' pipes, with the lock open; the others wait
for its word.
"""

import collections
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple, Self

from tp_core.errors import ConfigError, TpError

from tp_runner._at_exit import watch
from tp_runner._options import Settings
from tp_runner._scheduling._assignments import Assignments
from tp_runner._scheduling._futures import Submissions, Ticket, settle
from tp_runner._scheduling._recycling import Recycling
from tp_runner._scheduling._retries import MOST_FAILED_STARTS, Death
from tp_runner._scheduling._run import Run
from tp_runner._scheduling._source import Source, open_source
from tp_runner._stats import RunnerStats, StatsCollector
from tp_runner._stream import ResultStream
from tp_runner._workers._events import Chunk, Died, Done, Event
from tp_runner._workers._fleet import Fleet
from tp_runner.errors import RunCancelledError, RunnerClosedError

__all__ = ["OpenRun", "RunnerPool"]


class OpenRun(NamedTuple):
    """What a run gives to its consumer.

    Attributes:
        chunks: Neighboring results, list by list.
        end: Stops their coming; for any thread.
        cancel: The same, and whoever waits for them gets ``RunCancelledError``.
    """

    chunks: Generator[list[Any], None, None]
    end: Callable[[], None]
    cancel: Callable[[], None]


class RunnerPool:
    """A fleet of workers, and the runs that take turns on it.

    Attributes:
        is_paused: Whether no more items are handed out.
    """

    def __init__(self, fleet: Fleet, settings: Settings) -> None:
        self.fleet = fleet
        self.settings = settings
        self.is_paused = False
        self._assignments = Assignments(fleet)
        self._collector = StatsCollector(fleet.devices, settings.timeline)
        self._recycling = Recycling(fleet, settings)
        self._restarts_left = settings.max_restarts
        self._failed_starts: collections.Counter[int] = collections.Counter()  # of each worker, in a row
        self._late: dict[int, float] = {}  # workers killed for a slow item, and when that one began
        self._runs: collections.deque[Run] = collections.deque()
        self._n_runs = 0
        self._submissions: Submissions | None = None
        # Guards everything above. Waiting for the workers happens outside of it, in one thread.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._waiter: int | None = None
        self._needs_start = False
        self._is_dropped = False  # nothing new may be asked for
        self._is_closing = False
        self._owner = os.getpid()
        try:
            self._on_events(fleet.start())
        except BaseException:
            fleet.close(timeout_s=0.0)
            raise
        watch(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        self.close(timeout_s=60.0 if kind is None else 0.0)

    # -- runs ----------------------------------------------------------------------------------

    def run(self, items: Iterable[Any], *, ordered: bool | None = None) -> ResultStream:
        """Return an iterator over the result of each item, in the items' order or as they come.

        Items are read lazily, and only so far ahead as the workers need. Closing the iterator early
        leaves the pool usable. Several iterators take turns on the workers.

        Raises:
            RunnerClosedError: The pool is closed.
        """
        return ResultStream.over(*self.open_run(items, ordered=ordered))

    def open_run(self, items: Iterable[Any], *, ordered: bool | None = None) -> OpenRun:
        """Return what :meth:`run` does as lists of neighboring results, and what ends them.

        Raises:
            RunnerClosedError: The pool is closed.
        """
        self._require_open()
        settings = self.settings
        opened: list[Run] = []

        def open_one() -> Run:
            source = open_source(
                items, self.fleet.wake, direct=self.fleet.direct, max_wait_s=settings.max_wait_s
            )
            run = self._new_run(source, ordered=settings.ordered if ordered is None else ordered)
            opened.append(run)
            return run

        steps = self._steps(open_one)

        def stop(reason: TpError) -> None:
            with self._lock:
                for run in opened:
                    run.end(reason)
                self._wake_all()

        def end() -> None:
            stop(RunCancelledError("this stream was closed"))
            try:
                steps.close()
            except ValueError:  # another thread reads it, and notices
                return

        return OpenRun(steps, end, lambda: stop(RunCancelledError("this stream was cancelled")))

    def _new_run(
        self, source: Source, *, ordered: bool, numbered: bool = False, on_error: str | None = None
    ) -> Run:
        with self._lock:
            self._require_open()
            self._on_events(self.fleet.poll())
            self._on_events(self.fleet.start())
            self._n_runs += 1
            run = Run(
                source,
                self.fleet,
                self._assignments,
                self.settings,
                number=self._n_runs,
                ordered=ordered,
                numbered=numbered,
                on_error=on_error or self.settings.on_error,
            )
            self._runs.append(run)
            return run

    def _steps(self, open_one: Callable[[], Run]) -> Generator[list[Any], None, None]:
        run, clock = open_one(), time.monotonic
        given: list[Any] = []
        try:
            while True:
                step = self._step(run)
                if step is None:
                    return
                given, error = step
                step = None
                if given:
                    began = clock()
                    yield given
                    run.chunking.consumed(clock() - began)
                if error is not None:
                    raise error
                given = []
        except (Exception, GeneratorExit):
            raise
        except BaseException:
            # An interrupt may have come between reading a message and acting on it.
            self._reset()
            raise
        finally:
            given.clear()  # whoever holds a list that was not read to its end reads no further
            with self._lock:
                run.end()
                if run in self._runs:
                    self._runs.remove(run)
                self._wake_all()

    def _step(self, run: Run) -> tuple[list[Any], BaseException | None] | None:
        """Return the next results of a run, and what to raise after them; ``None`` at its end."""
        with self._lock:
            while True:
                run.check()
                if self._needs_start:
                    self._needs_start = False
                    self._on_events(self.fleet.start())
                chunk = run.next_finished()
                if chunk is not None:
                    if not self.fleet.direct and not run.is_stopping:
                        self._on_events(self.fleet.poll())
                        self._dispatch()
                    given, error = run.outcome(chunk)
                    self._collector.delivered += len(given)
                    return given, error
                if run.is_over():
                    return None
                self._dispatch()
                if not run.has_finished() and run.awaits_results():
                    self._wait()

    # -- what whoever waits does for all ---------------------------------------------------------

    def _dispatch(self) -> None:
        """Hand out chunks, one of each run in turn, as long as workers take more."""
        fleet, assignments, runs = self.fleet, self._assignments, self._runs
        most = fleet.most_credits
        idle = 0  # so many runs in a row had nothing to hand out
        while idle < len(runs) and not self.is_paused:
            run = runs[0]
            runs.rotate(-1)
            idle += 1
            if run.is_stopping:
                continue
            worker = assignments.idlest(run.number, min(run.credits(), most))
            chunk = run.next_chunk(self._recycling.left(worker)) if worker is not None else None
            if worker is None or chunk is None:
                continue
            idle = 0
            before = chunk.nbytes
            try:
                assignments.send(worker, chunk)
            except Exception as error:  # noqa: BLE001 - a user's __reduce__ may do anything
                run.on_pickling_error(chunk, error)
            else:
                run.on_sent(chunk, before)
                self._recycling.on_sent(worker, len(chunk.items))

    def _wait(self) -> None:
        """Wait until something may have happened, with the lock open."""
        timeout_s = self._due_in()
        if self._waiter is None:
            self._waiter = threading.get_ident()
            self._lock.release()
            try:
                self.fleet.wait(timeout_s)
            finally:
                self._lock.acquire()
                self._waiter = None
                self._changed.notify_all()
        else:
            self._changed.wait(timeout_s)
        self._on_events(self.fleet.poll())
        self._check_timeouts()

    def _wake_all(self) -> None:
        """Have everybody who waits look again."""
        self._changed.notify_all()
        if self._waiter is not None:
            self.fleet.wake()

    def _on_events(self, events: list[Event]) -> None:
        if not events:
            return
        runs = {run.number: run for run in self._runs}
        for event in events:
            if isinstance(event, Done):
                chunk = self._assignments.arrived(event)
                if chunk is not None:
                    self._recycling.on_done(event.worker)
                    self._collector.done(event.worker, chunk.start, len(chunk.items), event.timing)
                    if chunk.run in runs:  # or it was ended, and nobody wants this any more
                        runs[chunk.run].on_done(chunk, event)
            elif isinstance(event, Died):
                self._on_death(event)
        self._wake_all()

    def _on_death(self, died: Died) -> None:
        """Start a dead worker again, if that is allowed; tell the runs."""
        worker = died.worker
        self._recycling.on_end(worker)
        if died.is_retired and died.failure is None:
            self.fleet.revive(worker)
            return
        chunks = self._assignments.lost(worker)
        self._collector.died(worker)
        began = self._late.pop(worker, None)
        if died.failure is not None:  # it was started again, and its start raised
            for run in self._runs:
                run.on_failed_start(_of(run, chunks), died, died.failure)
            return
        self._failed_starts[worker] = 0 if died.was_ready else self._failed_starts[worker] + 1
        may_start = self._restarts_left > 0 and self._failed_starts[worker] < MOST_FAILED_STARTS
        is_revived = began is not None or may_start
        if is_revived:
            self._restarts_left -= began is None
            self.fleet.revive(worker)
        # The item for which a late worker was killed may just have ended: nobody is to blame then.
        is_blameless = began is not None and died.began != began
        death = Death(
            died,
            current=None if is_blameless else died.current,
            is_timeout=began is not None,
            is_revived=is_revived,
            any_alive=is_revived or self._assignments.any_alive(),
            held=(),
        )
        for run in self._runs:
            run.on_worker_death(_of(run, chunks), death)

    def _due_in(self) -> float | None:
        """Return in how many seconds somebody must look, whatever happens."""
        waits = [run.source.due_in() for run in self._runs]
        limit = self.settings.timeout_s
        if limit is not None and (busy := self._assignments.busy()):
            now = time.monotonic()
            waits.append(limit)
            for worker in busy:
                started = self.fleet.started(worker)
                if started is not None and worker not in self._late:
                    waits.append(max(started[1] + limit - now, 0.001))
        return min((wait for wait in waits if wait is not None), default=None)

    def _check_timeouts(self) -> None:
        """Kill workers whose item has taken too long."""
        limit = self.settings.timeout_s
        if limit is None:
            return
        now = time.monotonic()
        for worker in self._assignments.busy():
            started = self.fleet.started(worker)
            if started is not None and worker not in self._late and now - started[1] > limit:
                self._late[worker] = started[1]
                self.fleet.kill(worker)

    def _reset(self) -> None:
        """Throw away what is on its way; runs other than the interrupted one start over with it."""
        with self._lock:
            self.fleet.reset()
            self._late.clear()
            chunks = self._assignments.all_lost()
            for run in self._runs:
                for chunk in _of(run, chunks):
                    run.requeue(chunk)
            self._needs_start = True
            self._wake_all()

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
            return self._done_at_once(item, raise_original=raise_original)
        with self._lock:
            self._require_open()
            submissions = self._submissions
            if submissions is None or submissions.is_finishing:
                submissions = self._submissions = Submissions(self.settings.max_wait_s)
                future = submissions.submit(item, raise_original=raise_original)
                run = self._new_run(submissions, ordered=False, numbered=True, on_error="return")
                submissions.serve(self._steps(lambda: run))
                return future
            future = submissions.submit(item, raise_original=raise_original)
            self._dispatch()
            if self.settings.timeout_s is not None or self.settings.max_wait_s is not None:
                self._wake_all()  # there may be something to look at earlier than was known
            return future

    def cancel_submitted(self) -> None:
        """Cancel the futures of items that no worker has been given yet."""
        with self._lock:
            if self._submissions is not None:
                self._submissions.cancel_line()

    def _done_at_once(self, item: Any, *, raise_original: bool) -> "Future[Any]":
        future: Future[Any] = Future()
        ticket = Ticket(future, raise_original)
        source = open_source([item], self.fleet.wake, direct=True, max_wait_s=None)
        run = self._new_run(source, ordered=False, numbered=True, on_error="return")
        for outcomes in self._steps(lambda: run):
            for _, result, error in outcomes:
                settle(ticket, result, error)
        return future

    def pause(self) -> None:
        """Hand out no more items until :meth:`resume`; results of those on their way still come."""
        self.is_paused = True

    def resume(self) -> None:
        """Go on handing out items."""
        with self._lock:
            self.is_paused = False
            self._dispatch()
            self._wake_all()

    def cancel(self) -> None:
        """End every stream: whoever waits for results gets ``RunCancelledError``."""
        with self._lock:
            for run in self._runs:
                if not isinstance(run.source, Submissions):
                    run.end(RunCancelledError("the call was cancelled"))
            self._wake_all()

    def stats(self) -> RunnerStats:
        """Return what the workers did so far."""
        return self._collector.snapshot()

    def write_timeline(self, path: str | os.PathLike[str]) -> None:
        """Write what each worker did when, in the Chrome trace format.

        Raises:
            ConfigError: The pool was opened without ``timeline=True``.
        """
        self._kept_timeline().write_timeline(path)

    def draw_timeline(self, width: int = 72) -> str:
        """Return a picture in text of how busy each worker was when.

        Raises:
            ConfigError: The pool was opened without ``timeline=True``.
        """
        return self._kept_timeline().draw_timeline(width)

    def _kept_timeline(self) -> StatsCollector:
        if not self.settings.timeline:
            msg = "nothing was kept for a timeline; open the runner with timeline=True"
            raise ConfigError(msg)
        return self._collector

    # -- the end -------------------------------------------------------------------------------

    def close(self, *, timeout_s: float = 60.0) -> None:
        """Finish what was submitted, end all streams and the workers; again, it does nothing.

        Args:
            timeout_s: How long the workers may take over their end; 0 ends everything at once, and
                futures that are not done get ``RunnerClosedError``.
        """
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
        with self._lock:
            for run in self._runs:
                run.end(RunnerClosedError("this runner was closed"))
            while self._waiter not in {None, threading.get_ident()}:
                self._wake_all()
                self._changed.wait(0.1)
            self._wake_all()
            self.fleet.close(timeout_s=timeout_s)
        if submissions is not None:
            submissions.join()

    def stop(self) -> None:
        """End the workers at once."""
        self.close(timeout_s=0.0)

    def drop(self) -> None:
        """End the workers when what was submitted is done; nobody else will use the pool."""
        if self._owner != os.getpid() or self._is_closing:
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
        """Finish what was submitted, as ``concurrent.futures`` does at the end of a program."""
        try:
            if self._owner == os.getpid() and self._submissions is not None:
                self._finish(self._submissions)
                self._submissions.join()
        finally:
            self.stop()

    def _finish(self, submissions: Submissions) -> None:
        with self._lock:
            submissions.is_finishing = True
            submissions.exhausted = not submissions.has_line()
            self.is_paused = False
            self._dispatch()
            self._wake_all()

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` or :meth:`drop` was called."""
        return self._is_closing or self._is_dropped

    def _require_open(self) -> None:
        if self._is_closing or self._is_dropped:
            msg = "this runner is closed; activate() starts it again"
            raise RunnerClosedError(msg)


def _of(run: Run, chunks: Iterable[Chunk]) -> list[Chunk]:
    return [chunk for chunk in chunks if chunk.run == run.number]
