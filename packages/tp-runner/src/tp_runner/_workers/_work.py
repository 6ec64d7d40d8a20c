"""Running a chunk of items in a worker, whatever kind of worker it is."""

import signal
import threading
import time
from collections.abc import Callable, MutableSequence
from typing import Any

from tp_runner._batching import Batching
from tp_runner._workers._failure import Failure
from tp_runner._workers._identity import seed_generators

__all__ = ["ENDING", "IDLE", "end_work", "run_chunk"]

IDLE = -1
"""In the first word of a worker's board: no chunk is being worked on."""

ENDING = -2
"""There, too: the worker was told to end, and does."""


def end_work(work: Any) -> Any:
    """Call the ``close`` attribute of a worker's work, where it has one; return what that returns."""
    return getattr(work, "close", lambda: None)()


def run_chunk(
    work: Callable[[Any], Any],
    items: list[Any],
    board: MutableSequence[int],
    *,
    timed: bool = False,
    batching: Batching | None = None,
    start: int = 0,
    seed: int | None = None,
) -> tuple[list[Any], bool]:
    """Apply ``work`` to each item; return the results and whether some are failures.

    Args:
        work: What to apply.
        items: The items of the chunk.
        board: What the parent looks at while this runs: the second word becomes the place of the
            item at work in its chunk, the third one the time at which it began, in nanoseconds.
        timed: Whether to note that time; it costs a little for each item.
        batching: How to hand several items to ``work`` at once.
        start: The place of the first item in the input.
        seed: What the random numbers of each item, or batch, depend on, beside its place.
    """
    if batching is not None:
        return _run_batches(work, items, board, batching, start, seed)
    results: list[Any] = []
    append = results.append
    failed = False
    numbered = enumerate(items)
    while True:
        try:
            if timed or seed is not None:
                now = time.monotonic_ns
                for board[1], item in numbered:
                    if seed is not None:
                        seed_generators(seed, start + board[1])
                    board[2] = now()
                    append(work(item))
            else:
                for board[1], item in numbered:
                    append(work(item))
        except BaseException as error:
            if _is_interrupt(error):
                raise
            append(Failure.of(error))
            failed = True
            continue  # with the item after it: the iterator remembers where it was
        return results, failed


def _run_batches(
    work: Callable[[Any], Any],
    items: list[Any],
    board: MutableSequence[int],
    batching: Batching,
    first: int,
    seed: int | None,
) -> tuple[list[Any], bool]:
    results: list[Any] = []
    failed = False
    for start in range(0, len(items), batching.size):
        part = items[start : start + batching.size]
        if seed is not None:
            seed_generators(seed, first + start)
        board[1], board[2] = start, time.monotonic_ns()
        try:
            results += batching.split(work(batching.join(part)), len(part))
        except BaseException as error:
            if _is_interrupt(error):
                raise
            results += [Failure.of(error)] * len(part)
            failed = True
    return results, failed


def _is_interrupt(error: BaseException) -> bool:
    """Whether it is about this program: elsewhere an interrupt was raised by the work itself."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # as in a worker process
    )
