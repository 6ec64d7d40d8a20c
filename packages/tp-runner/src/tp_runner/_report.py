"""Turning a failure in a worker into the exception that the caller gets."""

import signal

from tp_runner._errors import ItemError, ItemTimeout, NotPicklableError, WorkerDied, WorkerError
from tp_runner._failure import DIED, END, INIT, ITEM, RAISED, RESULT, TIMEOUT, Failure

__all__ = ["describe_exit", "failure_to_error"]

_KINDS: dict[str, type[ItemError]] = {
    DIED: WorkerDied,
    TIMEOUT: ItemTimeout,
    ITEM: NotPicklableError,
    RESULT: NotPicklableError,
}
_SAYINGS = {
    RAISED: "the work on item {index} ({item}) raised on {device}, worker {worker}: {summary}",
    ITEM: "item {index} ({item}) cannot travel to worker {worker} on {device}: {summary}",
    RESULT: "the result of item {index} ({item}) cannot travel from worker {worker} on {device}: {summary}",
    DIED: "worker {worker} on {device} died with item {index} ({item}): {summary}",
    TIMEOUT: "item {index} ({item}) {summary} on {device}; worker {worker} was replaced",
    INIT: "worker {worker} did not start on {device}: {summary}",
    END: "the end of worker {worker} on {device} raised: {summary}",
}


def failure_to_error(
    failure: Failure, *, index: int | None = None, item: str = "", device: str, worker: int
) -> ItemError:
    """Make the exception that says what happened, to which item, where."""
    kind: type[ItemError] = _KINDS.get(failure.kind, WorkerError)
    message = _SAYINGS[failure.kind].format(
        index=index, item=item, device=device, worker=worker, summary=failure.summary
    )
    if failure.traceback:
        message += f"\n\nTraceback in the worker:\n{failure.traceback.rstrip()}"
    error = kind(
        message,
        index=index,
        item=item,
        device=device,
        worker=worker,
        remote_traceback=failure.traceback,
    )
    if isinstance(error, WorkerDied):
        error.exitcode = failure.exitcode
        error.held = failure.held
    error.__cause__ = failure.exception
    return error


def describe_exit(exitcode: int | None) -> str:
    """Say how a process ended."""
    if exitcode is None:
        return "it did not say how"
    if exitcode >= 0:
        return f"exit status {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    hint = "; the system may have run out of memory" if exitcode == -signal.SIGKILL else ""
    return f"killed by {name}{hint}"
