"""What workers of every kind have in common for the one who hands out the work."""

import abc
from dataclasses import dataclass, field
from typing import Any, ClassVar

from tp_runner._failure import Failure

__all__ = ["Chunk", "Died", "Done", "Event", "Fleet", "Ready", "Timing"]


@dataclass(slots=True, eq=False)
class Chunk:
    """Some neighbouring items, which travel together.

    Attributes:
        seq: Its number, unique in a fleet's life.
        start: The place of its first item in the input.
        items: The items.
        call: The number of the call that it belongs to.
        parent: The chunk that it is a part of, when that one is tried again in parts.
        offset: The place of its first item in the parent.
        attempts: How often its items have been tried before.
        deaths: How many workers its first item has killed.
        results: A result, or a failure, for each item.
        missing: How many results parts of it still owe.
        failed: Whether some results are failures.
        nbytes: How many bytes its items, and later its results, take.
    """

    seq: int
    start: int
    items: list[Any]
    call: int
    parent: "Chunk | None" = None
    offset: int = 0
    attempts: int = 0
    deaths: int = 0
    results: list[Any] = field(default_factory=list)
    missing: int = 0
    failed: bool = False
    nbytes: int = 0


@dataclass(slots=True, frozen=True)
class Timing:
    """How a worker spent its time on a chunk, in seconds; ``began`` is the monotonic clock's."""

    began: float = 0.0
    waited_s: float = 0.0
    worked_s: float = 0.0
    sent_s: float = 0.0


@dataclass(slots=True, frozen=True)
class Done:
    """A worker has finished a chunk."""

    worker: int
    seq: int
    results: list[Any]
    failed: bool
    timing: Timing
    nbytes: int = 0


@dataclass(slots=True, frozen=True)
class Ready:
    """A worker that was started again can take chunks."""

    worker: int


@dataclass(slots=True, frozen=True)
class Died:
    """A worker has ended by itself.

    Attributes:
        worker: Its number.
        exitcode: The exit status of its process; the negative number of a signal.
        current: The number of the chunk that it was working on, and the place in it.
        began: When it began with that item, by the monotonic clock.
        failure: Why it did not start, when it did not.
    """

    worker: int
    exitcode: int | None
    current: tuple[int, int] | None = None
    failure: Failure | None = None
    began: float = 0.0


Event = Done | Ready | Died


class Fleet(abc.ABC):
    """Workers, one for each device. Not safe for threads, save for :meth:`wake`."""

    direct: ClassVar[bool] = False
    """Whether the work is done by whoever polls, so that nothing goes on meanwhile."""

    most_credits: int = 3
    """How many chunks a worker may have been given at a time."""

    most_items: int | None = None
    """How many items, or one batch, a chunk may have at most; ``None`` for as many as are worth it."""

    devices: tuple[str, ...]

    @property
    def size(self) -> int:
        """How many workers there are."""
        return len(self.devices)

    @abc.abstractmethod
    def start(self) -> list["Event"]:
        """Start the workers that are not running, and wait until they are ready.

        Returns:
            What happened to the others meanwhile.

        Raises:
            WorkerError: The start of one raised; all are stopped.
        """

    @abc.abstractmethod
    def send(self, worker: int, chunk: Chunk) -> None:
        """Hand a chunk to a worker without waiting; set its ``nbytes``.

        Raises:
            Exception: An item cannot be pickled; nothing was sent.
        """

    @abc.abstractmethod
    def poll(self, timeout_s: float | None) -> list[Event]:
        """Wait for something to happen; return at once if something has."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Make :meth:`poll` return; for other threads."""

    @abc.abstractmethod
    def close(self, *, timeout_s: float) -> None:
        """End all workers; those that have not ended in time are killed where that is possible.

        Raises:
            WorkerError: The end of one raised.
        """

    def reset(self) -> None:  # noqa: B027 - nothing to do where nothing is on its way
        """Throw away everything that is on its way, workers too where they cannot be stopped."""

    def started(self, worker: int) -> tuple[int, float] | None:
        """Return the chunk at work and when its current item began, by the monotonic clock."""
        del worker
        return None

    def kill(self, worker: int) -> None:  # noqa: B027 - where it is possible
        """End a worker at once; ``Died`` follows."""

    def revive(self, worker: int) -> None:  # noqa: B027 - where it is possible
        """Start a dead worker again; ``Ready`` or ``Died`` follows."""

    def ready(self, worker: int) -> bool:
        """Whether a worker may be given chunks now."""
        return self.alive(worker)

    def alive(self, worker: int) -> bool:
        """Whether a worker runs, or is about to."""
        del worker
        return True
