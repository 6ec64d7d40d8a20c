"""Running a chunk of items in a worker, whatever kind of worker it is."""

import signal
import threading
import time
import types
from collections.abc import Callable
from typing import Any

from tp_runner._batching import NOT_AWAITED, Batching
from tp_runner._workers._failure import Failure
from tp_runner._workers._identity import seed_generators
from tp_runner._workers._item import Task

__all__ = ["ENDING", "IDLE", "end_work", "run_chunk"]

IDLE = -1
"""In the first word of a worker's board: no chunk is being worked on."""

ENDING = -2
"""There, too: the worker was told to end, and does."""

_UNAWAITED = (types.CoroutineType, types.AsyncGeneratorType)


def end_work(work: Any) -> Any:
    """Call the ``close`` attribute of a worker's work, where it has one; return what that returns."""
    return getattr(work, "close", lambda: None)()


def run_chunk(work: Callable[[Any], Any], items: list[Any], task: Task) -> tuple[list[Any], bool]:
    """Apply ``work`` to each item; return the results and whether some are failures.

    Args:
        work: What to apply.
        items: The items of the chunk.
        task: What the worker is at, which has begun with this chunk.
    """
    try:
        if task.is_cancelled():  # nobody will look at the results
            return [None] * len(items), False
        if task.batching is not None:
            return _run_batches(work, items, task, task.batching)
        return _run_items(work, items, task)
    finally:
        task.end()


def _run_items(work: Callable[[Any], Any], items: list[Any], task: Task) -> tuple[list[Any], bool]:
    results: list[Any] = []
    append = results.append
    failed = False
    board, seed, start = task.board, task.global_seed, task.start
    # Without a limit and a seed nothing is noted but the place: each call counts here.
    is_plain = task.timeout_s is None and seed is None
    numbered = enumerate(items)
    while True:
        try:
            if is_plain:
                for board[1], item in numbered:
                    append(work(item))
            else:
                now = time.monotonic_ns
                for board[1], item in numbered:
                    if seed is not None:
                        seed_generators(seed, start + board[1])
                    board[2] = now()
                    append(work(item))
        except BaseException as error:
            if _is_interrupt(error):
                raise
            append(Failure.of(error))
            failed = True
            continue  # with the item after it: the iterator remembers where it was
        return results, _refuse_unawaited(results, failed=failed)


def _run_batches(
    work: Callable[[Any], Any], items: list[Any], task: Task, batching: Batching
) -> tuple[list[Any], bool]:
    results: list[Any] = []
    failed = False
    board, seed = task.board, task.global_seed
    for start in range(0, len(items), batching.size):
        part = items[start : start + batching.size]
        if seed is not None:
            seed_generators(seed, task.start + start)
        board[1], board[2] = start, time.monotonic_ns()
        try:
            answer = work(batching.join(part))
            if type(answer) in _UNAWAITED:
                raise _not_awaited(answer)
            results += batching.split(answer, len(part))
        except BaseException as error:
            if _is_interrupt(error):
                raise
            results += [Failure.of(error)] * len(part)
            failed = True
    return results, failed


def _refuse_unawaited(results: list[Any], *, failed: bool) -> bool:
    """Put a failure in the place of what nobody would await; return whether there are failures now."""
    # One look, as work is of one kind; unless the last item may be the one that failed.
    if not results or not (failed or type(results[-1]) in _UNAWAITED):
        return failed
    for place, result in enumerate(results):
        if type(result) in _UNAWAITED:
            results[place] = Failure.of(_not_awaited(result), skip_frames=0)
            failed = True
    return failed


def _not_awaited(result: Any) -> TypeError:
    if type(result) is types.CoroutineType:
        result.close()  # or Python warns that it was never awaited
    return TypeError(NOT_AWAITED.format(name=result.__qualname__))


def _is_interrupt(error: BaseException) -> bool:
    """Whether it is about this program: elsewhere an interrupt was raised by the work itself."""
    return (
        isinstance(error, KeyboardInterrupt)
        and threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGINT) is not signal.SIG_IGN  # as in a worker process
    )
