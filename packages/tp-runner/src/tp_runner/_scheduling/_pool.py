"""The pool of running workers: streams and submitted items take turns, pauses, the end.

Any number of runs are open at a time: streams, asynchronous streams, and one for all submitted items. The
scheduler has no thread of its own. Of the threads that wait for results, which hand out chunks and take in
answers, one sleeps on the workers' pipes, without the lock; the others sleep on a condition, until it
notifies them.
"""

import collections
import contextlib
import math
import os
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from tp_core.errors import ConfigError, TpError
from tp_core.plugins import Pool

from tp_runner._options import Settings
from tp_runner._scheduling._run import MOST_FAILED_STARTS, Assignments, Death, PassState, Recycling
from tp_runner._scheduling._source import ItemSource, Submissions, Ticket, open_source, settle
from tp_runner._stats_collector import StatsCollector
from tp_runner._stream import FORKED, Interruption, OpenRun, ResultStream
from tp_runner._workers._failure import raised_by_signal_handler
from tp_runner._workers._fleet import Chunk, Died, Done, Event, Fleet, failure_of_death, watch
from tp_runner._workers._pickling import USERS_ERRORS
from tp_runner.errors import RunCancelledError, RunnerClosedError

if TYPE_CHECKING:
    from tp_runner._stats import RunnerStats

# -- The turns of the runs ----------------------------------------------------------------------


class FleetScheduler:
    """Runs that take turns on a fleet of workers."""

    def __init__(self, fleet: Fleet, settings: Settings, *, wait: bool) -> None:
        self.fleet = fleet
        self.settings = settings
        self.is_paused = False  # whether no more items are handed out
        self.collector = StatsCollector(fleet.devices, settings.timeline)  # the workers' statistics
        self.runs: collections.deque[PassState] = collections.deque()  # the open runs
        # Reentrant: a signal handler may close a stream in the thread that holds it.
        self.lock = threading.RLock()  # guards everything here. One thread waits for the workers, without it
        self._assignments = Assignments(fleet)
        self._recycling = Recycling(fleet, settings)
        self._restarts_left = settings.max_restarts
        self._failed_starts: collections.Counter[int] = collections.Counter()  # of each worker, in a row
        self._late: dict[int, float] = {}  # workers killed for a slow item, and when that one began
        self._n_runs = 0
        self._changed = threading.Condition(self.lock)
        self._waiter: int | None = None
        self._owner = os.getpid()
        self._needs_start = False
        self._half_told: list[PassState] = []  # the runs that are being told of an event
        if wait:
            self._on_events(fleet.start(self._takes_restart))
        else:
            fleet.launch()

    def new_run(
        self, source: ItemSource, *, ordered: bool, numbered: bool = False, on_error: str | None = None
    ) -> PassState:
        with self.lock:
            self._take_in()
            events = self._start_fleet()
            self._n_runs += 1
            run = PassState(
                source,
                self.fleet,
                self._assignments,
                self.settings,
                number=self._n_runs,
                ordered=ordered,
                numbered=numbered,
                on_error=on_error or self.settings.on_error,
            )
            self.runs.append(run)
            try:
                # A worker may have failed to start by now. That is reported once, to the runs that there are.
                self._take_in(events)
            except BaseException:
                self.runs.remove(run)
                raise
            return run

    def steps(self, open_one: Callable[[], PassState]) -> Generator[list[Any], None, None]:
        """Yield lists of neighboring results of a run, which is opened at the first request."""
        run = open_one()
        clock = time.monotonic
        results: list[Any] = []
        try:
            while True:
                step = self._step(run)
                if step is None:
                    return
                results, error = step
                step = None
                if results:
                    began = clock()
                    yield results
                    run.flow.consumed(clock() - began)
                if error is not None:
                    raise error
                results = []
        except BaseException as error:
            if isinstance(error, TpError | GeneratorExit) or error is run.source.error:
                raise
            # A signal handler has raised, perhaps between reading a message and acting on it: other runs send
            # their items again (test_an_interrupt_of_one_stream_loses_nothing_of_another).
            self.reset()
            raise
        finally:
            results.clear()  # the receiver of a list reads no further after the end
            if self._owner == os.getpid():  # a forked copy must not touch the lock and the pipes
                self.end_run(run)

    def end_run(self, run: PassState, reason: TpError | None = None) -> None:
        with self.lock:
            run.end(reason)
            if run in self.runs:
                self.runs.remove(run)
            for worker in self._assignments.holders(run.number):
                self.fleet.cancel(worker, run.number)
            self.wake_all()

    def kill_busy(self, runs: list[PassState], kill_after_s: float) -> None:
        """Wait until no worker is busy with items of ended runs; kill those that still are after the wait."""
        numbers = {run.number for run in runs}
        deadline = time.monotonic() + kill_after_s
        with self.lock:
            while busy := self._assignments.busy_with(numbers):
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    for worker in busy.difference(self._late):
                        started = self.fleet.started(worker)
                        # As with a timeout: it takes none of max_restarts, and blames no item of another run.
                        if started is None:
                            self._late[worker] = 0.0
                        else:
                            self._late[worker] = started[1]
                        self.fleet.kill(worker)
                most_s = left_s if left_s > 0 else None
                interrupted = self._wait(most_s)
                if interrupted is not None:
                    raise interrupted

    def _step(self, run: PassState) -> tuple[list[Any], BaseException | None] | None:
        """Return the next results of a run, and the error to raise after them; ``None`` at its end."""
        with self.lock:
            while True:
                run.check()
                if self._needs_start:
                    self._take_in(self._start_fleet())
                chunk = run.next_finished()
                if chunk is not None:
                    if not self.fleet.direct and not run.is_stopping:
                        self._take_in()
                        self.dispatch()
                    results, error = run.outcome(chunk)
                    self.collector.delivered += len(results)
                    return results, error
                if run.is_over():
                    return None
                self.dispatch()
                if not run.has_finished() and run.awaits_results():
                    interrupted = self._wait()
                    if interrupted is not None:
                        return Interruption(interrupted), None

    def _start_fleet(self) -> list[Event]:
        """Start the missing workers; return the events of the others."""
        try:
            events = self.fleet.start(self._takes_restart)
        except BaseException:
            # As a rule all workers were stopped, and with them what they did for other runs: each of those
            # sends its items again, or raises what its own start raises.
            if not self._assignments.any_alive():
                self.reset()
            raise
        self._needs_start = False
        return events

    def dispatch(self) -> None:
        """Hand out chunks, one of each run in turn, as long as workers take more."""
        fleet, assignments, runs = self.fleet, self._assignments, self.runs
        most = fleet.most_credits
        idle = 0  # this many runs in a row had nothing to hand out
        is_news = False  # a run changes here, and another thread may wait for it
        while idle < len(runs) and not self.is_paused:
            run = runs[0]
            runs.rotate(-1)
            idle += 1
            if run.is_stopping:
                continue
            worker = assignments.idlest(run.number, min(run.credits(), most))
            if worker is None:
                continue
            had_ended = run.source.exhausted
            try:
                chunk = run.next_chunk(self._recycling.left(worker))
            except BaseException as error:
                # A signal handler has raised, and items that were read may be nowhere: this run, which may be
                # another one than the caller's, must not end as if it were whole.
                run.end(RunCancelledError(f"a signal handler raised {error!r} while items were handed out"))
                raise
            is_news |= run.source.exhausted and not had_ended
            if chunk is None:
                continue
            idle = 0
            before = chunk.nbytes
            try:
                assignments.send(worker, chunk)
            except BaseException as error:
                assignments.withdraw(chunk)
                if not isinstance(error, USERS_ERRORS) or raised_by_signal_handler(error):
                    run.again.append(chunk)  # an interrupt must not lose the chunk
                    raise
                run.on_pickling_error(chunk, error)
                is_news = True
            else:
                run.flow.sent(chunk, before)
                self._recycling.on_sent(worker, len(chunk.items))
        if is_news:
            self.wake_all()

    def _wait(self, most_s: float | None = None) -> Exception | None:
        """Wait until something may have happened, with the lock open; at most ``most_s`` seconds.

        Returns:
            The error of a signal handler in that time, which has disturbed nothing.
        """
        timeout_s = self._seconds_until_due()
        if most_s is not None and (timeout_s is None or most_s < timeout_s):
            timeout_s = most_s
        interrupted: BaseException | None = None
        earlier = self._waiter
        me = threading.get_ident()
        lock_state = (1, me)  # how often this thread holds the lock, as Condition keeps it
        is_waiter = earlier in {None, me}  # me: a signal handler waits, on top of a wait of this thread
        try:
            if is_waiter:
                self._waiter = me
                # All of it: a signal handler may be here on top of a frame that holds the lock, too.
                lock_state = self.lock._release_save()  # type: ignore[attr-defined]  # as Condition does
                self.fleet.wait(timeout_s)
            else:
                self._changed.wait(timeout_s)
        except BaseException as error:  # noqa: BLE001 - a handler may raise anything
            interrupted = error
        # Handlers may raise here, and where Condition.wait takes the lock back. The callers' `with` blocks
        # need the lock at their ends ("handlers raise all the time" in test_threads_and_kills). The question
        # is in the block, too: a handler that is due runs as soon as it is answered.
        is_owned = False
        while not is_owned:
            try:
                if not self.lock._is_owned():  # type: ignore[attr-defined]  # as Condition asks
                    self.lock._acquire_restore(lock_state)  # type: ignore[attr-defined]  # as Condition does
                is_owned = True
            except BaseException as error:  # noqa: BLE001 - as above
                interrupted = error
        if is_waiter:
            self._waiter = earlier
            self._changed.notify_all()
            if earlier is not None:  # the interrupted wait of this thread must see the events of this one
                self.fleet.wake()
        if interrupted is not None:
            # An interrupt ends the stream. Inline, the wait is the work, and was disturbed by any error.
            if self.fleet.direct or not isinstance(interrupted, Exception):
                raise interrupted
            return interrupted
        self._take_in()
        self._check_timeouts()
        return None

    @contextlib.contextmanager
    def unlocked(self) -> Iterator[None]:
        """Open the lock in a block that waits for another thread, which may need it.

        A signal handler may be here on top of a frame of this thread that holds it.
        """
        if not self.lock._is_owned():  # type: ignore[attr-defined]  # as Condition asks
            yield
            return
        lock_state = self.lock._release_save()  # type: ignore[attr-defined]  # as Condition does
        try:
            yield
        finally:
            self.lock._acquire_restore(lock_state)  # type: ignore[attr-defined]  # as Condition does

    def wake_all(self) -> None:
        self._changed.notify_all()
        if self._waiter is not None:
            self.fleet.wake()

    def _take_in(self, events: Iterable[Event] = ()) -> None:
        """Act on events, and on the messages that the workers have sent by now."""
        try:
            self._on_events([*events, *self.fleet.poll()])
        except BaseException:
            # A signal handler has raised, perhaps between reading a message and acting on it.
            self.reset()
            raise

    def _on_events(self, events: list[Event]) -> None:
        if not events:
            return
        runs = {run.number: run for run in self.runs}
        for event in events:
            if isinstance(event, Done):
                chunk = self._assignments.find(event)
                if chunk is None:
                    continue
                # A handler that raises before this line leaves the chunk with its worker, and one that raises
                # behind the last line has changed nothing. In between, reset() ends the run.
                if chunk.run in runs:
                    self._half_told = [runs[chunk.run]]
                else:
                    self._half_told = []
                self._assignments.take_finished(event)
                self._recycling.on_done(event.worker)
                self.collector.done(event.worker, chunk.start, len(chunk.items), event.timing)
                if chunk.run in runs:  # or the run has ended
                    runs[chunk.run].on_done(chunk, event)
            elif isinstance(event, Died):
                self._half_told = [*self.runs]
                self._on_death(event)
            self._half_told = []
        self.wake_all()

    def _on_death(self, died: Died) -> None:
        """Start a dead worker again, if that is allowed; hand its chunks to their runs."""
        worker = died.worker
        self._recycling.on_end(worker)
        began = self._late.pop(worker, None)
        if died.is_retired and died.failure is None:
            self.fleet.revive(worker)
            return
        chunks = self._assignments.take_from(worker)
        self.collector.died(worker)
        if died.failure is not None:  # it was started again, and its start raised
            for run in self.runs:
                run.on_failed_start(_chunks_of(run, chunks), died, died.failure)
            return
        is_revived = began is not None or self._takes_restart(died)
        if is_revived:
            self.fleet.revive(worker)
        # The late item may have ended just before the kill: then no item is to blame.
        is_blameless = began is not None and died.began != began
        current = None if is_blameless else died.current
        death = Death(
            died,
            current=current,
            is_timeout=began is not None,
            is_revived=is_revived,
            any_alive=is_revived or self._assignments.any_alive(),
            held=(),
        )
        for run in self.runs:
            run.on_worker_death(_chunks_of(run, chunks), death)
            if not died.was_ready and death.any_alive and not self.settings.max_restarts:
                # Perhaps it held nothing; but no run may lose a worker unnoticed.
                run.on_failed_start([], died, failure_of_death(died))

    def _takes_restart(self, died: Died) -> bool:
        """Return whether a dead worker may be started again, and count the restart."""
        worker = died.worker
        if died.was_ready:
            self._failed_starts[worker] = 0
        else:
            self._failed_starts[worker] += 1
        may_restart = self._restarts_left > 0 and self._failed_starts[worker] < MOST_FAILED_STARTS
        if may_restart:
            self._restarts_left -= 1
        return may_restart

    def _seconds_until_due(self) -> float | None:
        """Return after how many seconds a wait must end, without any event."""
        waits: list[float | None] = []
        for run in self.runs:
            waits += [run.source.seconds_until_due(), run.again.seconds_until_due()]
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
        """Kill workers with an item that has taken too long."""
        limit = self.settings.timeout_s
        if limit is None:
            return
        now = time.monotonic()
        for worker in self._assignments.busy():
            started = self.fleet.started(worker)
            if started is not None and worker not in self._late and now - started[1] > limit:
                self._late[worker] = started[1]
                self.fleet.kill(worker)

    def reset(self) -> None:
        """Drop all chunks on their way; runs other than the interrupted one send theirs again.

        A run that was interrupted while it was told of an event may lack a result, or have one twice: it
        ends, and says why.
        """
        with self.lock:
            for run in self._half_told:
                run.end(RunCancelledError("a signal handler raised while results were taken in"))
            self._half_told = []
            self.fleet.reset()
            self._late.clear()
            chunks = self._assignments.take_all()
            for run in self.runs:
                for chunk in _chunks_of(run, chunks):
                    run.again.append(chunk)
            self._needs_start = True
            self.wake_all()

    def close(self, reason: Callable[[], TpError], *, timeout_s: float) -> None:
        with self.lock:
            for run in [*self.runs]:
                self.end_run(run, reason())
            # Not under the feet of a thread that sleeps on the workers' pipes: they are closed below.
            while self._waiter not in {None, threading.get_ident()}:
                self.wake_all()
                self._changed.wait(0.1)
            self.wake_all()
            self._assignments.take_all()  # a stream that is closed later asks no worker
            self.fleet.close(timeout_s=timeout_s)


def _chunks_of(run: PassState, chunks: Iterable[Chunk]) -> list[Chunk]:
    return [chunk for chunk in chunks if chunk.run == run.number]


# -- The pool -----------------------------------------------------------------------------------


class RunnerPool(Pool):
    """A fleet of workers, and the runs that take turns on it."""

    def __init__(self, fleet: Fleet, settings: Settings, *, wait: bool = True) -> None:
        self.fleet = fleet
        self.settings = settings
        self._submissions: Submissions | None = None
        self._is_dropped = False  # no new runs or items are accepted
        self._is_closing = False
        self._owner = os.getpid()
        self._scheduler = FleetScheduler(fleet, settings, wait=wait)
        self._lock = self._scheduler.lock
        watch(self)

    def __exit__(self, *raised: object) -> None:
        timeout_s = None if raised[0] is None else 0.0
        self.close(timeout_s=timeout_s)

    # -- runs ----------------------------------------------------------------------------------

    def run(self, items: Iterable[Any], *, ordered: bool | None = None) -> ResultStream[Any]:
        """Return an iterator over the result of each item, in the items' order or as they come.

        Items are read lazily, and only so far ahead as the workers need. Closing the iterator early
        leaves the pool usable. Several iterators take turns on the workers.
        """
        return ResultStream(self.open_run(items, ordered=ordered))

    def open_run(self, items: Iterable[Any], *, ordered: bool | None = None) -> OpenRun:
        """Return the run of :meth:`run` as lists of neighboring results, with functions that end it."""
        self._require_open()
        settings = self.settings
        opened: list[PassState] = []
        ended: list[str] = []  # perhaps before the run is opened, by the first result

        def open_one() -> PassState:
            source = open_source(
                items, self.fleet.wake, direct=self.fleet.direct, max_wait_s=settings.max_wait_s
            )
            if ordered is None:
                is_ordered = settings.ordered
            else:
                is_ordered = ordered
            run = self._new_run(source, ordered=is_ordered)
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

    def _end_runs(self, runs: list[PassState], reason: str, kill_after_s: float | None = None) -> None:
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
        self, source: ItemSource, *, ordered: bool, numbered: bool = False, on_error: str | None = None
    ) -> PassState:
        with self._lock:
            self._require_open()
            return self._scheduler.new_run(source, ordered=ordered, numbered=numbered, on_error=on_error)

    # -- from other threads --------------------------------------------------------------------

    def submit(self, item: Any, *, raise_original: bool = False) -> "Future[Any]":
        """Return a future of the result of one item.

        With ``raise_original`` it raises what the work raised, where that could travel, with our error as its
        cause, and not the other way around.
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
            was_closed = self._is_closing  # by a signal handler, in the midst of this call
        if was_closed:
            submissions.abandon(RunnerClosedError("this runner was closed"))
        return future

    def cancel_submitted(self) -> None:
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

    def stats(self) -> "RunnerStats":
        return self._scheduler.collector.snapshot(self.fleet.where)

    def exit_results(self) -> list[Any]:
        return self.fleet.exit_results()

    def timeline(self) -> StatsCollector:
        if not self.settings.timeline:
            msg = "nothing was kept for a timeline; open the runner with timeline=True"
            raise ConfigError(msg)
        return self._scheduler.collector

    # -- the end -------------------------------------------------------------------------------

    def close(self, *, timeout_s: float | None = None) -> None:
        """Finish the submitted items, end all streams and the workers; see `_Runner.close`."""
        if timeout_s is None:
            timeout_s = self.settings.end_timeout_s
        if self._owner != os.getpid():
            return
        with self._lock:
            if self._is_closing:
                return
            self._is_closing = True
            submissions = self._submissions
        if submissions is not None and timeout_s > 0:
            self._finish(submissions)
            self._join(submissions)
        self._scheduler.close(lambda: RunnerClosedError("this runner was closed"), timeout_s=timeout_s)
        if submissions is not None:
            self._join(submissions)

    def _join(self, submissions: Submissions) -> None:
        with self._scheduler.unlocked():
            submissions.join()

    def stop(self) -> None:
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
        try:
            if self._owner == os.getpid() and self._submissions is not None:
                self._finish(self._submissions)
                self._join(self._submissions)
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
            if self._is_dropped:  # perhaps as nobody had the runner any more
                msg = "this runner is closed; keep it in a variable as long as its streams are read"
            raise RunnerClosedError(msg)
