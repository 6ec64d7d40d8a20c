"""Workers in name only: everything is done in the caller's thread, for a debugger."""

import collections
import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

from tp_runner._options import Settings
from tp_runner._workers._failure import END, INIT, Failure
from tp_runner._workers._fleet import Chunk, Died, Done, Event, Fleet, Timing
from tp_runner._workers._identity import WorkerInfo, acting_as, keep_generators, seed_generators
from tp_runner._workers._item import Task, at_work
from tp_runner._workers._work import end_work, run_chunk

__all__ = ["InlineFleet"]


PERIOD_S = 0.01


class InlineFleet(Fleet):
    """Does the work when it is waited for. Breakpoints and profilers see all of it."""

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
        self._task = Task(settings, [0, 0, 0], self._cancelled)

    def start(self, may_restart: Callable[[Died], bool]) -> list[Event]:  # noqa: ARG002 - nobody dies
        for worker in range(len(self._works), self.size):
            with acting_as(self._info(worker)), self._kept(self._settings.seed):
                try:
                    self._works.append(self._program(self.devices[worker]))
                except Exception as error:
                    raise self.error(worker, Failure.of(error, INIT)) from error
        return []

    def _info(self, worker: int) -> WorkerInfo:
        return WorkerInfo(worker, self.size, self.devices[worker], self._settings.seed)

    @contextlib.contextmanager
    def _kept(self, seed: int | None = None) -> Iterator[None]:
        """Leave the caller's generators as they were, where there is a seed; begin with ``seed``."""
        if self._settings.seed is None:
            yield
            return
        with keep_generators():
            if seed is not None:
                seed_generators(seed)
            yield

    def send(self, worker: int, chunk: Chunk) -> None:
        self._waiting.append((worker, chunk))

    def wait(self, timeout_s: float | None) -> None:
        if not self._waiting:  # another thread may bring something, or go on after a pause
            time.sleep(PERIOD_S if timeout_s is None else min(timeout_s, PERIOD_S))
            return
        worker, chunk = self._waiting.popleft()
        began = time.monotonic()
        self._task.begin(chunk.start, chunk.run, chunk.sent - 1)
        with acting_as(self._info(worker)), self._kept(), at_work(self._task):
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
                    with acting_as(self._info(worker)), self._kept():
                        result = end_work(work)
            except Exception as error:  # noqa: BLE001 - raised when all have ended
                failures.append((worker, Failure.of(error, END)))
            self._endings[worker].append(result)
        for worker, failure in failures:
            raise self.error(worker, failure)
