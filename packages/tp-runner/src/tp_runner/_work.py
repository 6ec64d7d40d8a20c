"""Running a chunk of items in a worker, whatever kind of worker it is."""

import time
from collections.abc import Callable, MutableSequence
from typing import Any

from tp_runner._batching import Batching
from tp_runner._failure import Failure

__all__ = ["IDLE", "run_chunk"]

IDLE = -1
"""In the first word of a worker's board: no chunk is being worked on."""


def run_chunk(
    work: Callable[[Any], Any],
    items: list[Any],
    board: MutableSequence[int],
    *,
    timed: bool = False,
    batching: Batching | None = None,
) -> tuple[list[Any], bool]:
    """Apply ``work`` to each item; return the results and whether some are failures.

    Args:
        work: What to apply.
        items: The items of the chunk.
        board: What the parent looks at while this runs: the second word becomes the place of the
            item at work in its chunk, the third one the time at which it began, in nanoseconds.
        timed: Whether to note that time; it costs a little for each item.
        batching: How to hand several items to ``work`` at once.
    """
    if batching is not None:
        return _run_batches(work, items, board, batching)
    results: list[Any] = []
    append = results.append
    failed = False
    numbered = enumerate(items)
    while True:
        try:
            if timed:
                now = time.monotonic_ns
                for board[1], item in numbered:
                    board[2] = now()
                    append(work(item))
            else:
                for board[1], item in numbered:
                    append(work(item))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the caller gets whatever it is
            append(Failure.of(error))
            failed = True
            continue  # with the item after it: the iterator remembers where it was
        return results, failed


def _run_batches(
    work: Callable[[Any], Any], items: list[Any], board: MutableSequence[int], batching: Batching
) -> tuple[list[Any], bool]:
    results: list[Any] = []
    failed = False
    for start in range(0, len(items), batching.size):
        part = items[start : start + batching.size]
        board[1], board[2] = start, time.monotonic_ns()
        try:
            results += batching.split(work(batching.join(part)), len(part))
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # noqa: BLE001 - the caller gets whatever it is
            results += [Failure.of(error)] * len(part)
            failed = True
    return results, failed
