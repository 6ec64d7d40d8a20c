"""Persistent threads that run one task at a time."""

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

__all__ = ["ReplicaThread"]

_POLL_S = 0.01
"""How often a thread polls for tasks that it was not woken for."""
_IDLE_S = 1.0
"""After so long without a task it stops polling."""

_ROUND_TRIPS = 7


class ReplicaThread:
    """A thread that waits for a task, runs it, and keeps its outcome until it is asked for.

    The thread refers to this object alone, so that it keeps no other memory alive.

    Args:
        name: The thread's name, as debuggers show it.

    Attributes:
        busy: Whether a task was given whose outcome has not been taken yet.
        thread: The thread itself.
    """

    __slots__ = (
        "_done",
        "_error",
        "_go",
        "_is_polling",
        "_offered_at",
        "_result",
        "_tasks",
        "busy",
        "thread",
    )

    def __init__(self, name: str) -> None:
        # Two locks used as signals: a queue or an event takes several times as long.
        self._go = threading.Lock()
        self._go.acquire()
        self._done = threading.Lock()
        self._done.acquire()
        self._tasks: deque[Callable[[], Any] | None] = deque()  # one at most; None ends the thread
        self._result: Any = None
        self._error: BaseException | None = None
        self._is_polling = False
        self._offered_at = 0.0
        self.busy = False
        self.thread = threading.Thread(target=_serve, args=(self,), name=name, daemon=True)
        self.thread.start()

    def start(self, task: Callable[[], Any]) -> None:
        """Run ``task`` in the thread; `wait` and `take` must follow."""
        self.busy = True
        self._tasks.append(task)
        self._wake()

    def offer(self, task: Callable[[], Any]) -> None:
        """Let the thread find ``task`` when it polls, every hundredth of a second; `take_back` must follow.

        The thread is not woken, which takes longer than a short task does. But if the caller's own task
        waits for this one, this one does run.
        """
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
        """Wait until the task is over; an exception in the waiting thread leaves it running."""
        self._done.acquire()

    def take(self) -> tuple[Any, BaseException | None]:
        """Return the outcome of the task: its result, or what it raised."""
        result, error = self._result, self._error
        self._result = self._error = None
        self.busy = False
        return result, error

    def round_trip_s(self) -> float:
        """Return the seconds to wake the thread and to wait for it: the median of some trials."""
        times = []
        for _ in range(_ROUND_TRIPS):
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
                self._is_polling = False
                self._is_polling = bool(self._tasks)  # offered just now, without waking the thread
            return True
        if task is None:
            return False
        try:
            self._result = task()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            self._error = error
        del task  # before the caller goes on: it may count on the memory
        self._done.release()
        return True

    def _wake(self) -> None:
        try:
            self._go.release()
        except RuntimeError:  # it was woken already, and has not run yet
            return


def _serve(thread: ReplicaThread) -> None:
    while thread.serve():
        pass


def _nothing() -> None:
    """Do nothing."""
