"""Workers as threads of this process; and inline workers, in the caller's own thread."""

import collections
import contextlib
import contextvars
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from tp_core.output import get_logger
from tp_core.random import preserve_rng_state

from tp_runner._options import Settings
from tp_runner._workers._failure import END, INIT, Failure
from tp_runner._workers._fleet import LONGEST_WAIT_S, Chunk, Died, Done, Event, Fleet, Ready
from tp_runner._workers._item import (
    WorkerIdentity,
    WorkerTask,
    seed_generators,
    set_current_task,
    worker_context,
)
from tp_runner._workers._setup import make_current
from tp_runner._workers._work import Timing, end_work, run_chunk

_log = get_logger("tp_runner")

SEED_OF_THREADS = (
    "seed=%d reaches tp_runner.item().rng alone, from which this work draws nothing: all threads share the "
    "global generators of Python, numpy and torch, which are left as they are"
)


class _Crew:
    """The threads of one start: what a later start must not share with those that have not ended."""

    def __init__(self) -> None:
        self.inboxes: list[queue.SimpleQueue[Chunk | None]] = []
        self.threads: list[threading.Thread] = []
        self.returned: dict[int, Any] = {}  # of each worker that was ready, what its end returned
        self.is_stopping = self.ends_at_once = False


class ThreadFleet(Fleet):
    """One thread for each device. Items and results are handed over as objects, without a copy."""

    can_kill = False

    def __init__(self, program: Any, devices: tuple[str, ...], settings: Settings) -> None:
        super().__init__(devices)
        self._program = program
        self._settings = settings
        # Simple queues, as their put is reentrant: a signal handler may wake the thread that it interrupts.
        # The crew of each event is beside it: those of a crew that was left behind are nobody's.
        self._events: queue.SimpleQueue[tuple[_Crew, Event] | None] = queue.SimpleQueue()
        self._waited_for: collections.deque[tuple[_Crew, Event] | None] = collections.deque()
        self._crew = _Crew()
        self._has_warned_of_seed = False

    def start(self, may_restart: Callable[[Died], bool]) -> list[Event]:  # noqa: ARG002 - threads do not die
        crew = self._crew
        if crew.threads:
            return []
        try:
            self._start(crew)
        except BaseException:  # also the system's, if it starts no more threads
            self._stop(timeout_s=0.0)
            raise
        return []

    def _start(self, crew: _Crew) -> None:
        for worker in range(self.size):
            crew.inboxes.append(queue.SimpleQueue())
            # The work sees the caller's context variables, as it does inline: decimal numbers have one, too.
            run = contextvars.copy_context().run
            thread = threading.Thread(
                target=run, args=(self._work, crew, worker), name=f"tp-worker-{worker}", daemon=True
            )
            thread.start()
            crew.threads.append(thread)
        unready = set(range(self.size))
        limit = self._settings.start_timeout_s
        deadline = time.monotonic() + (limit or math.inf)
        while unready:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                failure = Failure(INIT, f"it was not ready after start_timeout_s={limit}")
                raise self.error(min(unready), failure)
            with contextlib.suppress(queue.Empty):
                entry = self._events.get(timeout=min(left_s, LONGEST_WAIT_S))
                if entry is None or entry[0] is not crew:
                    continue
                event = entry[1]
                if isinstance(event, Died) and event.failure is not None:
                    raise self.error(event.worker, event.failure)
                unready.discard(event.worker)

    def _work(self, crew: _Crew, worker: int) -> None:
        device = self.devices[worker]
        with worker_context(WorkerIdentity(worker, self.size, device, None)):
            try:
                make_current(device)  # a thread begins with the first one
                work = self._program(device)
            except BaseException as error:  # noqa: BLE001 - the caller gets whatever it is
                self._events.put((crew, Died(worker, None, failure=Failure.of(error, INIT))))
                return
            crew.returned[worker] = None
            self._events.put((crew, Ready(worker)))
            self._serve(crew, worker, work)
            try:
                if crew.ends_at_once:
                    crew.returned[worker] = None
                else:
                    crew.returned[worker] = end_work(work)
            except BaseException as error:  # noqa: BLE001 - as above
                self._events.put((crew, Died(worker, None, failure=Failure.of(error, END))))

    def _serve(self, crew: _Crew, worker: int, work: Any) -> None:
        """Work on chunks until ``None`` comes, or the crew stops."""
        task = WorkerTask(self._settings, [0, 0, 0], self._cancelled, seeds_globals=False)
        set_current_task(task)
        waiting = time.monotonic()
        while (chunk := crew.inboxes[worker].get()) is not None and not crew.is_stopping:
            began = time.monotonic()
            task.begin(chunk.start, chunk.run, chunk.sent - 1)
            results, failed = run_chunk(work, chunk.items, task)
            if self._settings.seed is not None and not (task.was_asked or self._has_warned_of_seed):
                self._has_warned_of_seed = True
                _log.warning(SEED_OF_THREADS, self._settings.seed)
            now = time.monotonic()
            timing = Timing(began, began - waiting, now - began, 0.0)
            self._events.put((crew, Done(worker, chunk.seq, results, failed, timing)))
            waiting = now
            chunk, results = None, []

    def send(self, worker: int, chunk: Chunk) -> None:
        self._crew.inboxes[worker].put(chunk)

    def wait(self, timeout_s: float | None) -> None:
        if timeout_s is None:
            timeout_s = None
        else:
            timeout_s = min(timeout_s, LONGEST_WAIT_S)
        with contextlib.suppress(queue.Empty):
            # In C from the get to the deque: between two calls here a signal handler may raise, and the event
            # would be in neither.
            self._waited_for.extend(map(self._events.get, (True,), (timeout_s,)))

    def poll(self) -> list[Event]:
        entries = [self._waited_for.popleft() for _ in range(len(self._waited_for))]
        is_woken = False
        with contextlib.suppress(queue.Empty):
            while True:
                entry = self._events.get_nowait()
                is_woken |= entry is None
                entries.append(entry)
        if is_woken:
            # The word is for the thread that waits: it would sleep on where another thread has taken it
            # (test_a_word_for_who_waits_is_not_lost_to_another_thread_that_polls).
            self.wake()
        return [entry[1] for entry in entries if entry is not None and entry[0] is self._crew]

    def wake(self) -> None:
        self._events.put(None)

    def reset(self) -> None:
        """Leave the threads to their items, and start afresh: an interrupt must not wait for them."""
        self._stop(timeout_s=0.0)

    def close(self, *, timeout_s: float) -> None:
        events = self._stop(timeout_s=timeout_s)
        for event in events:
            if isinstance(event, Died) and event.failure is not None:
                raise self.error(event.worker, event.failure)

    def _stop(self, *, timeout_s: float) -> list[Event]:
        crew = self._crew
        crew.is_stopping, crew.ends_at_once = True, timeout_s == 0
        for inbox in crew.inboxes:
            inbox.put(None)
        deadline = time.monotonic() + timeout_s
        threads = {
            n: thread for n, thread in enumerate(crew.threads) if thread is not threading.current_thread()
        }
        for thread in threads.values():
            thread.join(min(max(0.0, deadline - time.monotonic()), LONGEST_WAIT_S))
        if timeout_s > 0:
            late = [worker for worker, thread in threads.items() if thread.is_alive()]
            self.warn_not_ended(late, timeout_s, "is left behind, as nobody can kill a thread")
        for worker, result in dict(crew.returned).items():
            self._endings[worker].append(result)
        events = self.poll()
        self._crew = _Crew()  # threads that have not ended keep theirs
        return events


INLINE_PERIOD_S = 0.01  # so often an inline worker looks for work that another thread has brought


class InlineFleet(Fleet):
    """Workers in the caller's thread: a wait does the work, and breakpoints and profilers see it."""

    direct: ClassVar[bool] = True
    can_kill = False
    most_items = 1
    most_credits = 1

    def __init__(self, program: Any, devices: tuple[str, ...], settings: Settings) -> None:
        super().__init__(devices)
        self._program = program
        self._settings = settings
        self._works: list[Any] = []
        self._waiting: collections.deque[tuple[int, Chunk]] = collections.deque()
        self._finished: list[Event] = []
        self._task = WorkerTask(settings, [0, 0, 0], self._cancelled)

    def start(self, may_restart: Callable[[Died], bool]) -> list[Event]:  # noqa: ARG002 - nobody dies
        for worker in range(len(self._works), self.size):
            with self._as_worker(worker, seed=self._settings.seed):
                try:
                    self._works.append(self._program(self.devices[worker]))
                except Exception as error:
                    raise self.error(worker, Failure.of(error, INIT)) from error
        return []

    @contextlib.contextmanager
    def _as_worker(
        self, worker: int, task: WorkerTask | None = None, *, seed: int | None = None
    ) -> Iterator[None]:
        """Act as a worker for a while, on its device; begin with ``seed``.

        The caller's generators are left as they were where there is a seed, and the current device always.
        """
        device = self.devices[worker]
        identity = WorkerIdentity(worker, self.size, device, self._settings.seed)
        with contextlib.ExitStack() as left:
            left.enter_context(worker_context(identity, task))
            if self._settings.seed is not None:
                left.enter_context(preserve_rng_state())
            if not device.startswith("cpu"):
                import torch

                left.enter_context(torch.accelerator.device_index(torch.device(device).index))
            if seed is not None:
                seed_generators(seed)
            yield

    def send(self, worker: int, chunk: Chunk) -> None:
        self._waiting.append((worker, chunk))

    def wait(self, timeout_s: float | None) -> None:
        if not self._waiting:  # another thread may bring something, or end a pause
            if timeout_s is None:
                pause_s = INLINE_PERIOD_S
            else:
                pause_s = min(timeout_s, INLINE_PERIOD_S)
            time.sleep(pause_s)
            return
        worker, chunk = self._waiting.popleft()
        began = time.monotonic()
        self._task.begin(chunk.start, chunk.run, chunk.sent - 1)
        with self._as_worker(worker, self._task):
            results, failed = run_chunk(self._works[worker], chunk.items, self._task)
        timing = Timing(began, 0.0, time.monotonic() - began, 0.0)
        self._finished.append(Done(worker, chunk.seq, results, failed, timing))

    def poll(self) -> list[Event]:
        events, self._finished = self._finished, []
        return events

    def reset(self) -> None:
        self._waiting.clear()
        self._finished.clear()

    def wake(self) -> None:
        """Do nothing: no thread waits."""

    def close(self, *, timeout_s: float) -> None:
        works, self._works = self._works, []
        self._waiting.clear()
        failures: list[tuple[int, Failure]] = []
        for worker, work in enumerate(works):
            result = None
            try:
                if timeout_s > 0:
                    with self._as_worker(worker):
                        result = end_work(work)
            except Exception as error:  # noqa: BLE001 - raised when all have ended
                failures.append((worker, Failure.of(error, END)))
            self._endings[worker].append(result)
        for worker, failure in failures:
            raise self.error(worker, failure)
