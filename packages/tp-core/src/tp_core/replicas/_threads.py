"""Persistent threads for replicas, and the outcomes of their calls."""

import math
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# -- Outcomes of calls ----------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    result: Any = None
    error: BaseException | None = None

    def fill(self, task: Callable[[], Any]) -> None:
        try:
            self.result = task()
        except BaseException as error:  # noqa: BLE001 - raised again when all parts are done
            self.error = error

    @property
    def interrupted(self) -> bool:
        """Whether the call ended with an exception that is not an error: Ctrl-C, an exit."""
        return self.error is not None and not isinstance(self.error, Exception)


def raise_first(outcomes: Sequence[Outcome], devices: Sequence[torch.device]) -> None:
    """Raise the error of the first part that has one, if any has.

    Interrupts come before errors. The type is kept, so that callers catch what the module raises. A
    note names the part and the device, and what else failed.
    """
    failed = [i for i, o in enumerate(outcomes) if o.error is not None]
    if not failed:
        return
    failed.sort(key=lambda i: not outcomes[i].interrupted)
    first, *others = failed
    error = outcomes[first].error
    notes = [f"in part {first} of {len(outcomes)}, on device {devices[first]}"]
    notes += [f"part {i} on device {devices[i]} failed too: {outcomes[i].error!r}" for i in others]
    for outcome in outcomes:
        outcome.error = None  # its traceback leads back here: a cycle would keep the parts alive
    try:
        if error is not None:
            error.add_note("; ".join(notes))
            raise error
    finally:
        error = None


# -- Persistent threads that run one task at a time -----------------------------------------------


_POLL_S = 0.01
"""Seconds between two looks of a thread for tasks that it was not woken for."""
_IDLE_S = 1.0
"""Seconds without a task after which a thread stops polling."""

_TRIALS = 7


class ReplicaThread:
    """A thread that waits for a task, runs it, and holds its outcome until `take`.

    The thread refers to this object alone, so that it keeps no other memory alive.

    Attributes:
        busy: Whether it has a task, or an outcome that was not taken yet.
        thread: The thread itself.
    """

    __slots__ = (
        "_done",
        "_error",
        "_go",
        "_is_over",
        "_is_polling",
        "_offered_at",
        "_result",
        "_tasks",
        "busy",
        "thread",
    )

    def __init__(self, name: str) -> None:
        # Two locks used as signals, acquired by one thread and released by the other: a queue or an
        # event takes several times as long.
        self._go = threading.Lock()
        self._go.acquire()
        self._done = threading.Lock()
        self._done.acquire()
        self._tasks: deque[Callable[[], Any] | None] = deque()  # one at most; None ends the thread
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_over = True
        self._is_polling = False
        self._offered_at = 0.0
        self.busy = False
        # A daemon: nobody stops idle threads at exit, and an abandoned task may never end.
        self.thread = threading.Thread(target=_serve, args=(self,), name=name, daemon=True)
        self.thread.start()

    def start(self, task: Callable[[], Any]) -> None:
        """Run ``task`` in the thread; `wait` and `take` must follow."""
        self._is_over = False
        self.busy = True
        self._tasks.append(task)
        self._wake()

    def offer(self, task: Callable[[], Any]) -> None:
        """Let the thread find ``task`` when it polls, every hundredth of a second; `take_back` must follow.

        The thread is not woken: that takes longer than a short task. If the caller's own task waits for
        this one, the thread runs it at its next poll, and the caller does not hang.
        """
        self._is_over = False
        self.busy = True
        self._offered_at = time.monotonic()
        self._tasks.append(task)
        if not self._is_polling:
            self._is_polling = True
            self._wake()

    def take_back(self) -> Callable[[], Any] | None:
        """Return the offered task, for the caller to run; ``None`` if the thread has begun it."""
        try:
            task = self._tasks.popleft()
        except IndexError:
            return None
        self.busy = False
        return task

    def wait(self) -> None:
        """Wait until the task is over; after an exception in the waiting thread, wait again."""
        while not self._is_over:
            self._done.acquire()
        self._done.acquire(blocking=False)  # if it was over before: the next task begins with a taken lock

    def take(self) -> tuple[Any, BaseException | None]:
        result, error = self._result, self._error
        self._result = self._error = None
        self.busy = False
        return result, error

    def round_trip_s(self) -> float:
        """Return the seconds to wake the thread and to wait for it: the median of several trials."""
        times = []
        for _ in range(_TRIALS):
            began = time.perf_counter()
            self.start(_nothing)
            self.wait()
            self.take()
            times.append(time.perf_counter() - began)
        return sorted(times)[len(times) // 2]

    def stop(self) -> None:
        """End the thread once its task, if it has one, is over."""
        self._tasks.append(None)
        self._wake()

    def serve(self) -> bool:
        """Run one task, if there is one; return whether there may be another."""
        self._go.acquire(timeout=_POLL_S if self._is_polling else -1)
        try:
            task = self._tasks.popleft()
        except IndexError:
            if self._is_polling and time.monotonic() - self._offered_at > _IDLE_S:
                # In this order: a task offered before the first line saw a polling thread and did not
                # wake it, so it must be found here; one offered later wakes the thread.
                self._is_polling = False
                self._is_polling = bool(self._tasks)
            return True
        if task is None:
            return False
        try:
            self._result = task()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            self._error = error
        del task  # before the caller continues: it may count on the memory
        self._is_over = True  # the caller reads the result without a lock once it has this
        _release(self._done)
        return True

    def _wake(self) -> None:
        _release(self._go)


def _release(signal: threading.Lock) -> None:
    try:
        signal.release()
    except RuntimeError:  # it is given already, and nobody has taken it yet
        return


def _serve(thread: ReplicaThread) -> None:
    while thread.serve():
        pass


def _nothing() -> None:
    """Do nothing."""


# -- The threads of a call ------------------------------------------------------------------------


_Task = Callable[[], Any]

_ROUND_TRIPS = 2
"""A thread's wake-up in round trips: more than one, as both threads want the interpreter meanwhile."""
_SHORT_S = 20e-6
"""Parts that take less are mostly Python: threads would wait for each other, however fast they wake."""
_CALLS = 16  # short ones in a row before parts run inline: one fast call must not flip the choice


class ReplicaThreads:
    """The threads of one module's replicas: the first task runs in the caller's thread.

    On CPUs the caller runs all tasks, one after the other, while they take less than waking a thread.
    """

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._threads: list[ReplicaThread] = []
        self._heuristic = InlineHeuristic(0.0)
        cleanup = weakref.finalize(self, _stop, self._threads)
        cleanup.atexit = False  # daemon threads need no cleanup at exit

    def __contains__(self, ident: int) -> bool:
        return any(thread.thread.ident == ident for thread in self._threads)

    @property
    def is_stuck(self) -> bool:
        """Whether a thread still runs a task of an earlier call, after an interrupt."""
        return any(thread.busy for thread in self._threads)

    def leave(self) -> None:
        _stop(self._threads)

    def forget(self) -> None:
        """Forget the threads in a forked process, where they do not exist."""
        self._threads.clear()

    def run(self, first: _Task, others: Sequence[_Task], *, in_turn: bool) -> list[Outcome]:
        """Run all tasks and return their outcomes.

        After an interrupt this call waits for the threads. A second interrupt abandons them and is raised.
        """
        outcomes = [Outcome() for _ in range(1 + len(others))]
        if in_turn:
            for task, outcome in zip((first, *others), outcomes, strict=True):
                if not any(o.interrupted for o in outcomes):
                    outcome.fill(task)
            return outcomes
        threads = self._first_threads(len(others))
        run = self._run_offered if self._heuristic.runs_inline else self._run_woken
        if run(first, others, threads, outcomes):
            self._await(threads, outcomes)
        return outcomes

    def _first_threads(self, count: int) -> list[ReplicaThread]:
        for number in range(len(self._threads) + 1, count + 1):
            self._threads.append(ReplicaThread(f"tp-replica-{number}-{self._devices[number]}"))
            if number == 1 and all(d.type == "cpu" for d in self._devices):
                waking_s = _ROUND_TRIPS * self._threads[0].round_trip_s()
                self._heuristic = InlineHeuristic(max(waking_s, _SHORT_S))
        return self._threads[:count]

    def _run_woken(
        self,
        first: _Task,
        others: Sequence[_Task],
        threads: Sequence[ReplicaThread],
        outcomes: Sequence[Outcome],
    ) -> bool:
        """Wake a thread for each task but the first, and run the first here.

        Returns:
            Whether there are threads to wait for.
        """
        self._hand_out(ReplicaThread.start, threads, others)
        try:
            began = time.perf_counter()
            outcomes[0].result = first()
            self._heuristic.note(len(others) * (time.perf_counter() - began))
        except BaseException as error:  # noqa: BLE001 - raised again when the others are done
            outcomes[0].error = error
        return True

    def _hand_out(
        self,
        give: Callable[[ReplicaThread, _Task], None],
        threads: Sequence[ReplicaThread],
        tasks: Sequence[_Task],
    ) -> None:
        try:
            for thread, task in zip(threads, tasks, strict=True):
                give(thread, task)
        except BaseException:
            # An interrupt: it is not known whether a thread has its task, and waiting might never end.
            self.leave()
            raise

    def _run_offered(
        self,
        first: _Task,
        others: Sequence[_Task],
        threads: Sequence[ReplicaThread],
        outcomes: Sequence[Outcome],
    ) -> bool:
        """Run the tasks one after the other, except those that a thread has taken meanwhile.

        After an interrupt the remaining tasks are left out.

        Returns:
            Whether there are threads to wait for.
        """
        self._hand_out(ReplicaThread.offer, threads, others)
        try:
            outcomes[0].result = first()
        except BaseException as error:  # noqa: BLE001 - as above
            outcomes[0].error = error
        began = time.perf_counter()
        is_interrupted, was_taken = outcomes[0].interrupted, False
        for thread, outcome in zip(threads, outcomes[1:], strict=True):
            left = thread.take_back() if thread.busy else None
            if left is None:
                was_taken = was_taken or thread.busy
            elif not is_interrupted:
                outcome.fill(left)
                is_interrupted = outcome.interrupted
        # A thread took a task only because the first one was long enough for a poll: not short.
        self._heuristic.note(math.inf if was_taken else time.perf_counter() - began)
        return was_taken

    def _await(self, threads: Sequence[ReplicaThread], outcomes: Sequence[Outcome]) -> None:
        interrupted = outcomes[0].interrupted
        for thread, outcome in zip(threads, outcomes[1:], strict=True):
            while thread.busy:
                try:
                    thread.wait()
                except BaseException as error:  # KeyboardInterrupt, as a rule
                    if interrupted:
                        self.leave()
                        raise
                    interrupted = True
                    outcomes[0].error = error
                else:
                    outcome.result, outcome.error = thread.take()


class InlineHeuristic:
    """The choice between waking threads and running short parts in the caller's thread.

    Args:
        inline_s: Parts that take fewer seconds are short; 0 for none.

    Attributes:
        runs_inline: Whether the parts should run serially in the caller's thread: from 16 short calls
            in a row on, until two calls are long.
    """

    def __init__(self, inline_s: float) -> None:
        self.runs_inline = False
        self._inline_s = inline_s
        self._short_calls = 0

    def note(self, seconds: float) -> None:
        """Record the seconds that the parts beyond the first take in the caller's thread."""
        if seconds < self._inline_s:
            self._short_calls = min(self._short_calls + 1, _CALLS)
        else:
            self._short_calls //= 2
        if self._short_calls == _CALLS:
            self.runs_inline = True
        elif self._short_calls < _CALLS // 2:
            self.runs_inline = False


def _stop(threads: list[ReplicaThread]) -> None:
    """End the threads; a module-level function, so that it keeps their owner's memory free."""
    for thread in threads:
        thread.stop()
    threads.clear()
