"""Persistent threads that run one task at a time."""

import threading
from collections.abc import Callable
from typing import Any

__all__ = ["Worker"]


class Worker:
    """A thread that waits for a task, runs it, and keeps its outcome until it is asked for.

    The thread knows this object and nothing else, so that it keeps nobody's memory alive.

    Args:
        name: The thread's name, for people and debuggers.

    Attributes:
        busy: Whether a task was started whose outcome was not taken yet.
        thread: The thread itself.
    """

    __slots__ = ("_done", "_error", "_go", "_result", "_task", "busy", "thread")

    def __init__(self, name: str) -> None:
        # Two locks used as signals: a queue or an event takes several times as long.
        self._go = threading.Lock()
        self._go.acquire()
        self._done = threading.Lock()
        self._done.acquire()
        self._task: Callable[[], Any] | None = None
        self._result: Any = None
        self._error: BaseException | None = None
        self.busy = False
        self.thread = threading.Thread(target=_serve, args=(self,), name=name, daemon=True)
        self.thread.start()

    def start(self, task: Callable[[], Any]) -> None:
        """Run ``task`` in the thread; `wait` and `take` must follow."""
        self.busy = True
        self._task = task
        self._go.release()

    def wait(self) -> None:
        """Wait until the task is over; an exception in the waiting thread leaves it running."""
        self._done.acquire()

    def take(self) -> tuple[Any, BaseException | None]:
        """Return the outcome of the task: its result, or what it raised."""
        result, error = self._result, self._error
        self._result = self._error = None
        self.busy = False
        return result, error

    def stop(self) -> None:
        """Let the thread end when its task, if it has one, is over."""
        self._task = None
        self._go.release()

    def serve(self) -> bool:
        """Run one task; say whether there may be another."""
        self._go.acquire()
        task, self._task = self._task, None
        if task is None:
            return False
        try:
            self._result = task()
        except BaseException as error:  # noqa: BLE001 - raised again in the caller
            self._error = error
        del task  # before the caller goes on: it may count on the memory
        self._done.release()
        return True


def _serve(worker: Worker) -> None:
    while worker.serve():
        pass
