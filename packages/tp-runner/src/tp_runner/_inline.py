"""Workers that are no workers: everything is done in the caller's thread, for a debugger."""

import collections
import time
from typing import Any, ClassVar

from tp_runner._failure import END, INIT, Failure
from tp_runner._fleet import Chunk, Done, Event, Fleet, Timing
from tp_runner._report import failure_to_error
from tp_runner._settings import Settings
from tp_runner._work import run_chunk

__all__ = ["InlineFleet", "finish_work", "start_work"]


def start_work(program: Any, device: str, worker: int) -> Any:
    """Start a program on a device in this process.

    Raises:
        WorkerError: Its start raised.
    """
    try:
        return program(device)
    except Exception as error:
        failure = Failure.of(error, INIT)
        raise failure_to_error(failure, device=device, worker=worker) from error


def finish_work(work: Any, device: str, worker: int) -> None:
    """End a program in this process.

    Raises:
        WorkerError: Its end raised.
    """
    try:
        getattr(work, "close", lambda: None)()
    except Exception as error:
        failure = Failure.of(error, END)
        raise failure_to_error(failure, device=device, worker=worker) from error


class InlineFleet(Fleet):
    """Does the work when it is polled. Breakpoints and profilers see all of it."""

    direct: ClassVar[bool] = True
    most_items = 1
    most_credits = 1

    def __init__(self, program: Any, devices: tuple[str, ...], settings: Settings) -> None:
        self.devices = devices
        self._program = program
        self._settings = settings
        self._works: list[Any] = []
        self._waiting: collections.deque[tuple[int, Chunk]] = collections.deque()

    def start(self) -> list[Event]:
        for worker in range(len(self._works), self.size):
            self._works.append(start_work(self._program, self.devices[worker], worker))
        return []

    def send(self, worker: int, chunk: Chunk) -> None:
        self._waiting.append((worker, chunk))

    def poll(self, timeout_s: float | None) -> list[Event]:
        if not self._waiting or timeout_s == 0:
            if timeout_s:
                time.sleep(min(timeout_s, 0.01))
            return []
        worker, chunk = self._waiting.popleft()
        began = time.monotonic()
        results, failed = run_chunk(
            self._works[worker], chunk.items, [0, 0, 0], batching=self._settings.batching
        )
        timing = Timing(began, 0.0, time.monotonic() - began, 0.0)
        return [Done(worker, chunk.seq, results, failed, timing)]

    def reset(self) -> None:
        self._waiting.clear()

    def wake(self) -> None:
        """Nothing waits."""

    def close(self, *, timeout_s: float) -> None:
        works, self._works = self._works, []
        self._waiting.clear()
        if timeout_s > 0:
            for worker, work in enumerate(works):
                finish_work(work, self.devices[worker], worker)
