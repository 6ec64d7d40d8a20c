"""What workers of every kind have in common for the one who hands out the work."""

import abc
from typing import ClassVar

from tp_runner._workers._events import Chunk, Event

__all__ = ["Fleet"]


class Fleet(abc.ABC):
    """Workers, one for each device. Not safe for threads, save for :meth:`wait` and :meth:`wake`."""

    direct: ClassVar[bool] = False
    """Whether the work is done by whoever waits, so that nothing goes on meanwhile."""

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
    def wait(self, timeout_s: float | None) -> None:
        """Wait for something that :meth:`poll` would return; one thread at a time."""

    @abc.abstractmethod
    def poll(self) -> list[Event]:
        """Return what has happened, without waiting."""

    @abc.abstractmethod
    def wake(self) -> None:
        """Make :meth:`wait` return; for other threads."""

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

    def retire(self, worker: int) -> None:  # noqa: B027 - where it is possible
        """Have a worker end when it has done what it was given; ``Died`` follows."""

    def private_memory(self, worker: int) -> int | None:
        """Return how many bytes a worker holds that it shares with nobody, where that can be known."""
        del worker
        return None

    def where(self, worker: int) -> str:
        """Return which machine a worker is on, where there are several."""
        del worker
        return ""

    def ready(self, worker: int) -> bool:
        """Whether a worker may be given chunks now."""
        return self.alive(worker)

    def alive(self, worker: int) -> bool:
        """Whether a worker runs, or is about to."""
        del worker
        return True
