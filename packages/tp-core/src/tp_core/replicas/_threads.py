"""A persistent thread for each replica but the first, and the outcomes of their calls."""

import os
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from tp_core.errors import ModelError

# -- Outcomes of calls ----------------------------------------------------------------------------


@dataclass(slots=True)
class Outcome:
    """What the call of one part has returned or raised, once it is over."""

    result: Any = None
    error: BaseException | None = None
    is_over: bool = False

    def fill(self, task: Callable[[], Any]) -> None:
        try:
            self.result = task()
        except BaseException as error:  # noqa: BLE001 - raised again when all parts are done
            self.error = error
        self.is_over = True

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


# -- Threads --------------------------------------------------------------------------------------


Task = Callable[[], Any]


class _Job(NamedTuple):
    """A task for a thread.

    Attributes:
        task: What to run.
        outcome: Where its result goes.
        over: Gets a value when the outcome is there, to wake the caller.
    """

    task: Task
    outcome: Outcome
    over: SimpleQueue[None]


class ReplicaThread:
    """A thread that runs one job after the other.

    The thread refers to the queue of its jobs alone, so that it keeps no other memory alive.

    Attributes:
        thread: The thread itself.
    """

    __slots__ = ("_jobs", "thread")

    def __init__(self, name: str) -> None:
        # It is written in C and sleeps on a lock: an event, or queue.Queue, takes several times as long.
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        # A daemon: nobody stops idle threads at exit, and an abandoned task may never end.
        self.thread = threading.Thread(target=_serve, args=(self._jobs,), name=name, daemon=True)
        self.thread.start()

    def start(self, job: _Job) -> None:
        self._jobs.put(job)

    def stop(self) -> None:
        """End the thread once its job, if it has one, is over."""
        self._jobs.put(None)


def _serve(jobs: SimpleQueue[_Job | None]) -> None:
    while (job := jobs.get()) is not None:
        job.outcome.fill(job.task)
        over = job.over
        del job  # before the caller continues: it may count on the memory
        over.put(None)


class ReplicaThreads:
    """The threads of one module's replicas: the first task runs in the caller's thread."""

    def __init__(self, devices: Sequence[torch.device]) -> None:
        self._devices = devices
        self._threads: list[ReplicaThread] = []
        cleanup = weakref.finalize(self, _stop, self._threads)
        cleanup.atexit = False  # daemon threads need no cleanup at exit

    def __contains__(self, ident: int) -> bool:
        return any(thread.thread.ident == ident for thread in self._threads)

    def forget(self) -> None:
        """Forget the threads in a forked process, where they do not exist."""
        self._threads.clear()

    def run(self, first: Task, others: Sequence[Task], *, in_turn: bool) -> list[Outcome]:
        """Run all tasks and return their outcomes.

        After an interrupt this call waits for the threads. A second interrupt abandons them and is raised.

        Args:
            first: The task for the caller's thread.
            others: The tasks for the threads.
            in_turn: Run all of them in the caller's thread, one after the other, up to an interrupt.
        """
        outcomes = [Outcome() for _ in range(1 + len(others))]
        if in_turn:
            for task, outcome in zip((first, *others), outcomes, strict=True):
                outcome.fill(task)
                if outcome.interrupted:
                    break
            return outcomes
        over: SimpleQueue[None] = SimpleQueue()
        process = os.getpid()
        try:
            for thread, task, outcome in zip(
                self._first_threads(len(others)), others, outcomes[1:], strict=True
            ):
                thread.start(_Job(task, outcome, over))
            outcomes[0].fill(first)
            if os.getpid() != process:
                raise outcomes[0].error or ModelError(_FORKED)
            _wait(outcomes, over)
        except BaseException:
            # An interrupt, as a rule. A thread may still run its task, so later calls need other ones.
            _stop(self._threads)
            raise
        return outcomes

    def _first_threads(self, count: int) -> list[ReplicaThread]:
        if len(self._threads) < count:
            # In a forked process torch makes its autograd engine anew at the first use, without a lock. A
            # forward uses it to save tensors: two threads that begin there at the same time would destroy the
            # engine twice (torch 2.13: a segmentation fault). This is a use, while the threads are not there.
            torch.autograd._is_checkpoint_valid()  # private: no public function only asks the engine
        for number in range(len(self._threads) + 1, count + 1):
            self._threads.append(ReplicaThread(f"tp-replica-{number}-{self._devices[number]}"))
        return self._threads[:count]


_FORKED = (
    "the module's forward has forked this process, which has none of the replicas' threads, so that their "
    "parts never end here; end a process that is forked inside of forward there, by os._exit()"
)


def _wait(outcomes: Sequence[Outcome], over: SimpleQueue[None]) -> None:
    """Wait until all outcomes are there, also after an interrupt; a second one is raised."""
    interrupted = outcomes[0].interrupted
    while True:
        try:
            while not all(outcome.is_over for outcome in outcomes):
                over.get()
        except BaseException as error:  # KeyboardInterrupt, as a rule
            if interrupted:
                raise
            interrupted = True
            outcomes[0].error = error
        else:
            return


def _stop(threads: list[ReplicaThread]) -> None:
    """End the threads; a module-level function, so that it keeps their owner's memory free."""
    for thread in threads:
        thread.stop()
    threads.clear()
