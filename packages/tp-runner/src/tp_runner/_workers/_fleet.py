"""The interface of workers of every kind: chunks, events, the fleet, and its end with the program."""

import abc
import atexit
import collections
import contextlib
import os
import warnings
import weakref
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, NamedTuple

from tp_runner._workers._failure import DIED, Failure
from tp_runner._workers._item_errors import failure_to_error
from tp_runner._workers._work import Timing
from tp_runner.errors import ItemError


class Chunk:
    """Some neighboring items, which travel together.

    Args:
        seq: Its number, unique in a fleet's life.
        start: The place of its first item in the input.
        items: The items.
        run: The number of the run that it belongs to.
        attempts: How often its items have been tried before.
        deaths: How many workers its first item has killed.
        sent: How often its items have been sent to a worker, this time included.
    """

    # No dataclass: making one takes as long as a fork.
    __slots__ = (
        "attempts",
        "deaths",
        "failed",
        "is_long",
        "items",
        "missing",
        "nbytes",
        "offset",
        "parent",
        "results",
        "run",
        "sent",
        "seq",
        "start",
    )

    def __init__(
        self,
        seq: int,
        start: int,
        items: list[Any],
        run: int,
        *,
        attempts: int = 0,
        deaths: int = 0,
        sent: int = 0,
    ) -> None:
        self.seq = seq
        self.start = start
        self.items = items
        self.run = run
        self.attempts = attempts
        self.deaths = deaths
        self.sent = sent
        # The whole chunk, if this is a part of one that is tried again in parts, and its place there
        self.parent: Chunk | None = None
        self.offset = 0
        self.results: list[Any] = []  # a result, or a failure, for each item
        self.missing = 0  # how many results parts of it still owe
        self.failed = False  # whether some results are failures
        # whether its items are expected to take so long that others should not wait behind it
        self.is_long = True
        self.nbytes = 0  # how many bytes its items, and later its results, take


class Done(NamedTuple):
    """Event of a chunk that a worker has finished."""

    worker: int
    seq: int
    results: list[Any]
    failed: bool
    timing: Timing
    nbytes: int = 0


class Ready(NamedTuple):
    """Event of a worker that can take chunks after a start."""

    worker: int


class Died(NamedTuple):
    """Event of a worker that has ended."""

    worker: int
    exitcode: int | None  # the exit status of its process; the negative number of a signal
    current: tuple[int, int] | None = None  # the number of its chunk at work, and the place in it
    failure: Failure | None = None  # why it did not start, when it did not
    began: float = 0.0  # when it began with that item, by the monotonic clock
    is_retired: bool = False  # whether the scheduler had asked it to end
    how: str = "it did not say how"
    was_ready: bool = True  # whether it had come to take items


Event = Done | Ready | Died

LONGEST_WAIT_S = 1e6
"""Longer waits are made of such ones: the system's count milliseconds in an int, 25 days at most."""


class Fleet(abc.ABC):
    """Workers, one for each device. Not safe for threads, save for :meth:`wait` and :meth:`wake`."""

    direct: ClassVar[bool] = False
    """``True`` if the waiting thread does the work itself."""

    can_kill: ClassVar[bool] = True
    """``True`` if a worker can be ended in the middle of an item."""

    most_credits: int = 3
    """The most chunks that a worker has at a time."""

    most_items: int | None = None
    """The most items of a chunk, or one batch; ``None`` to adapt."""

    def __init__(self, devices: tuple[str, ...]) -> None:
        self.devices = devices
        self._endings: list[list[Any]] = [[] for _ in devices]
        # The newest cancelled runs; more than can be with the workers at a time.
        self._cancelled: collections.deque[int] = collections.deque(maxlen=4 * len(devices))

    def exit_results(self) -> list[Any]:
        """Return what the end of each worker returned, by number; of one that was replaced, of each in turn.

        Raises:
            NotPicklableError: One of them could not travel here.
        """
        for worker, results in enumerate(self._endings):
            for result in results:
                if isinstance(result, Failure):
                    raise self.error(worker, result)
        return [result for results in self._endings for result in results]

    @property
    def size(self) -> int:
        return len(self.devices)

    def error(self, worker: int, failure: Failure) -> ItemError:
        """Return the exception that says why a worker did not start, or not end, as it should."""
        return failure_to_error(failure, device=self.devices[worker], worker=worker)

    @abc.abstractmethod
    def start(self, may_restart: Callable[["Died"], bool]) -> list["Event"]:
        """Start the workers that are not running, and wait until they are ready.

        Args:
            may_restart: Whether one that has died by then is started again; asked once for each death.

        Returns:
            The events of the others in that time.

        Raises:
            WorkerError: The start of one raised; all are stopped.
            WorkerDiedError: One died, and was not started again; all are stopped.
        """

    def warn_not_ended(self, workers: Iterable[int], timeout_s: float, what: str = "was killed") -> None:
        """Warn that workers had no orderly end: a silent limit would lose the work of their ends."""
        for worker in workers:
            warnings.warn(
                f"worker {worker} on {self.devices[worker]} had not ended after {timeout_s:g} s, and {what}: "
                "its producer_end, or the item before it, takes longer; end_timeout_s= gives more time",
                RuntimeWarning,
                stacklevel=2,
            )

    def launch(self) -> None:  # noqa: B027 - where it is possible
        """Begin to start the workers that are not running; ``Ready`` or ``Died`` follows of each."""

    @abc.abstractmethod
    def send(self, worker: int, chunk: Chunk) -> None:
        """Hand a chunk to a worker without waiting; set its ``nbytes``.

        Raises:
            Exception: An item cannot be pickled; nothing was sent.
        """

    @abc.abstractmethod
    def wait(self, timeout_s: float | None) -> None:
        """Wait for an event of :meth:`poll`; one thread at a time."""

    @abc.abstractmethod
    def poll(self) -> list[Event]:
        """Return the events so far, without waiting."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Make :meth:`wait` return, or the next one, though others call :meth:`poll`; for any thread."""

    @abc.abstractmethod
    def close(self, *, timeout_s: float) -> None:
        """End all workers; those that have not ended in time are killed where that is possible.

        Raises:
            WorkerError: A program raised in its end.
        """

    def reset(self) -> None:  # noqa: B027 - nothing to do where nothing is on its way
        """Drop all chunks on their way, and workers, too, where they cannot be stopped."""

    def started(self, worker: int) -> tuple[int, float] | None:
        """Return the chunk at work and when its current item began, by the monotonic clock."""
        del worker
        return None

    def cancel(self, worker: int, run: int) -> None:
        """Let a worker know that a run is cancelled."""
        del worker
        if run not in self._cancelled:
            self._cancelled.append(run)

    def kill(self, worker: int) -> None:  # noqa: B027 - where it is possible
        """End a worker at once; ``Died`` follows."""

    def revive(self, worker: int) -> None:  # noqa: B027 - where it is possible
        """Start a dead worker again; ``Ready`` or ``Died`` follows."""

    def retire(self, worker: int) -> None:  # noqa: B027 - where it is possible
        """Let a worker end after its chunks; ``Died`` follows."""

    def private_memory(self, worker: int) -> int | None:
        """Return how many bytes of private memory a worker has, where the system says it."""
        del worker
        return None

    def where(self, worker: int) -> str:
        """Return which machine a worker is on, where there are several."""
        del worker
        return ""

    def ready(self, worker: int) -> bool:
        """Return whether a worker may be given chunks now."""
        return self.alive(worker)

    def alive(self, worker: int) -> bool:
        """Return whether a worker runs, or is about to."""
        del worker
        return True


def failure_of_death(died: Died) -> Failure:
    """Describe a worker's death."""
    if died.was_ready:
        how = died.how
    else:
        how = f"before it was ready: {died.how}"
    failure = Failure(DIED, how, exitcode=died.exitcode)
    failure.worker = died.worker
    return failure


# Weak: a runner that the program forgets ends by its __del__, and not with the program.
_open: weakref.WeakSet[Any] = weakref.WeakSet()
_last: weakref.WeakSet[Any] = weakref.WeakSet()
_owner = 0
_is_ending = False


def is_program_ending() -> bool:
    """Return whether this process has come to its end, where only daemon threads run beside the main one."""
    return _is_ending


def watch(closable: Any, *, last: bool = False) -> None:
    """Call ``closable.at_exit()`` at the end of this process, if it still exists then.

    Args:
        closable: The pool or fork server to end.
        last: If ``True``, after all others: fork servers outlive the workers that they report on.
    """
    global _owner, _is_ending  # noqa: PLW0603 - they are about the process
    if _owner != os.getpid():  # a forked worker has cleared the parent's handlers, and may start runners
        _owner = os.getpid()
        _is_ending = False
        atexit.register(_end_all)
    fleets = _last if last else _open
    fleets.add(closable)


def _end_all() -> None:
    global _is_ending  # noqa: PLW0603 - it is about the process
    _is_ending = True
    with contextlib.ExitStack() as ends:  # all of them, whatever one raises, and the last ones first
        for closable in [*_last, *_open]:
            ends.callback(closable.at_exit)
