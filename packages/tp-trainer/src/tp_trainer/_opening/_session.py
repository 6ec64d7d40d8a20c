"""Opening the session of a selected backend, alike for `Trainer` and `ParallelTrainer`."""

import atexit
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Any

from tp_core.errors import PluginError
from tp_core.plugins import Job, Selection, Session

from tp_trainer._opening._agreement import check_same_at_start

__all__ = ["open_session"]

_GRACE_S = 15.0
_STDERR = 2


def open_session(selection: Selection, job: Job, facts: Mapping[str, Any]) -> Session:
    """Open ``job`` on the selected backend, once all ranks are known to have the same facts.

    The session's seed is rank 0's. The session is closed when the process ends, if nobody did so.

    Args:
        selection: The backend that runs the job.
        job: What is to be done.
        facts: What else must be the same on all ranks, as JSON can say it.

    Raises:
        DisagreementError: The ranks chose different backends, options or facts.
        PluginError: The backend opened something that is not a session.
    """
    chosen = f"{selection.chosen.name!r} of {selection.chosen.origin}"
    options = job.options.get(selection.chosen.name, {})
    if job.environment.is_distributed:
        _end_after_failure()
    seed = check_same_at_start(
        job.environment, {"backend": chosen, "options": options, **facts}, seed=job.seed
    )
    try:
        session = selection.backend.open(replace(job, seed=seed))
    except Exception as error:
        error.add_note(f"while opening backend {chosen}")
        raise
    if not isinstance(session, Session):
        msg = f"backend {chosen} must open a Session, got {type(session).__name__}"
        raise PluginError(msg)
    atexit.register(_close_at_exit, weakref.ref(session))
    return session


def _close_at_exit(reference: weakref.ref[Session]) -> None:
    session = reference()
    # After an uncaught exception the other ranks do not close with this one.
    if session is not None and not hasattr(sys, "last_value"):
        session.close()


def _end_after_failure() -> None:
    """End this process soon after an exception that nobody caught has ended its main thread.

    Threads that are not daemons would keep it alive, while the others wait for it in a collective, and the
    launcher for its end.
    """
    if not isinstance(sys.excepthook, _Hook) and not hasattr(sys, "ps1"):
        sys.excepthook = _Hook(sys.excepthook)


class _Hook:
    """Shows an exception as before; from then on the process has so many seconds to end."""

    def __init__(self, show: Callable[..., Any]) -> None:
        self._show = show

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        threading.Thread(target=_end, name="tp-failed-end", daemon=True).start()
        self._show(kind, error, trace)


def _end() -> None:
    time.sleep(_GRACE_S)
    main = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if not thread.daemon and thread is not main]
    if names:  # otherwise something else is at work, such as what was registered for the exit
        text = f"tp_trainer: this rank has failed, and is ended although it has threads: {', '.join(names)}\n"
        os.write(_STDERR, text.encode())
        os._exit(1)
