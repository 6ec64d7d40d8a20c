"""What goes to workers and what comes back, whatever kind of worker it is."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from tp_runner._workers._failure import Failure

__all__ = ["Chunk", "Died", "Done", "Event", "Ready", "Timing"]


@dataclass(slots=True, eq=False)
class Chunk:
    """Some neighboring items, which travel together.

    Attributes:
        seq: Its number, unique in a fleet's life.
        start: The place of its first item in the input.
        items: The items.
        run: The number of the run that it belongs to.
        parent: The chunk that it is a part of, when that one is tried again in parts.
        offset: The place of its first item in the parent.
        attempts: How often its items have been tried before.
        deaths: How many workers its first item has killed.
        results: A result, or a failure, for each item.
        missing: How many results parts of it still owe.
        failed: Whether some results are failures.
        is_long: Whether its items take so long, for all that is known, that others had better not wait
            behind it.
        nbytes: How many bytes its items, and later its results, take.
    """

    seq: int
    start: int
    items: list[Any]
    run: int
    parent: "Chunk | None" = None
    offset: int = 0
    attempts: int = 0
    deaths: int = 0
    results: list[Any] = field(default_factory=list)
    missing: int = 0
    failed: bool = False
    is_long: bool = True
    nbytes: int = 0


class Timing(NamedTuple):
    """How a worker spent its time on a chunk, in seconds; ``began`` is the monotonic clock's."""

    began: float = 0.0
    waited_s: float = 0.0
    worked_s: float = 0.0
    sent_s: float = 0.0


class Done(NamedTuple):
    """A worker has finished a chunk."""

    worker: int
    seq: int
    results: list[Any]
    failed: bool
    timing: Timing
    nbytes: int = 0


class Ready(NamedTuple):
    """A worker that was started again can take chunks."""

    worker: int


class Died(NamedTuple):
    """A worker has ended by itself.

    Attributes:
        worker: Its number.
        exitcode: The exit status of its process; the negative number of a signal.
        current: The number of the chunk that it was working on, and the place in it.
        began: When it began with that item, by the monotonic clock.
        failure: Why it did not start, when it did not.
        is_retired: Whether it was told to end.
        is_out_of_memory: Whether the system has killed it for want of memory.
        was_ready: Whether it had come to take items.
    """

    worker: int
    exitcode: int | None
    current: tuple[int, int] | None = None
    failure: Failure | None = None
    began: float = 0.0
    is_retired: bool = False
    is_out_of_memory: bool = False
    was_ready: bool = True


Event = Done | Ready | Died
