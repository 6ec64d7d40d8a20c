"""The caller's exception for a failure."""

import signal

from tp_runner._workers._failure import DIED, END, ENDING, INIT, ITEM, RAISED, RESULT, TIMEOUT, Failure
from tp_runner.errors import (
    ItemError,
    ItemTimeoutError,
    NotPicklableError,
    WorkerDiedError,
    WorkerError,
    copy_attributes,
    make_error,
)

_ERRORS: dict[str, type[ItemError]] = {
    DIED: WorkerDiedError,
    TIMEOUT: ItemTimeoutError,
    ITEM: NotPicklableError,
    RESULT: NotPicklableError,
    ENDING: NotPicklableError,
}
_MESSAGES = {
    RAISED: "the work on item {index} ({item}) raised on {device}, worker {worker}: {summary}",
    ITEM: "item {index} ({item}) cannot travel to worker {worker} on {device}: {summary}",
    RESULT: "the result of item {index} ({item}) cannot travel from worker {worker} on {device}: {summary}",
    DIED: "worker {worker} on {device} died with item {index} ({item}): {summary}",
    TIMEOUT: "item {index} ({item}) {summary} on {device}; worker {worker} was replaced",
    INIT: "worker {worker} did not start on {device}: {summary}",
    END: "the end of worker {worker} on {device} raised: {summary}",
    ENDING: "the end of worker {worker} on {device} returned what cannot travel: {summary}",
}
_DIED_ALONE = "worker {worker} on {device} died: {summary}"


def failure_to_error(
    failure: Failure, *, index: int | None = None, item: str = "", device: str, worker: int
) -> ItemError:
    """Make the exception that says what happened, to which item, where."""
    error_type: type[ItemError] = _ERRORS.get(failure.kind, WorkerError)
    text = _MESSAGES[failure.kind]
    if failure.kind == DIED and index is None:
        text = _DIED_ALONE
    message = text.format(index=index, item=item, device=device, worker=worker, summary=failure.summary)
    if failure.traceback:
        message += f"\n\nTraceback in the worker:\n{failure.traceback.rstrip()}"
    if error_type is WorkerError:
        original_type = failure.original_type
    else:
        original_type = None
    error = make_error(
        error_type,
        original_type,
        message,
        type_name=failure.type_name,
        index=index,
        item=item,
        device=device,
        worker=worker,
        remote_traceback=failure.traceback,
        exceptions=getattr(failure.exception, "exceptions", ()),
    )
    if isinstance(error, WorkerDiedError):
        error.exitcode = failure.exitcode
        error.held = failure.held
    error.__cause__ = failure.exception
    if error.original_type is not None and failure.exception is not None:
        copy_attributes(failure.exception, error)
    return error


def describe_exit(exitcode: int | None) -> str:
    """Return how a process ended, in words."""
    if exitcode is None:
        return "nobody knows how, as this program ignores SIGCHLD, or other code has waited for the process"
    if exitcode >= 0:
        return f"exit status {exitcode}"
    try:
        name = signal.Signals(-exitcode).name
    except ValueError:
        name = f"signal {-exitcode}"
    if exitcode == -signal.SIGKILL:
        hint = "; the system may have run out of memory"
    else:
        hint = ""
    return f"killed by {name}{hint}"
