"""Opening the session of a selected backend, the same way for every face of the trainer."""

import atexit
import sys
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tp_core import Job, Selection, Session
from tp_core.errors import PluginError

from tp_trainer._handshake import shake_hands

__all__ = ["open_session"]


def open_session(selection: Selection, job: Job, facts: Mapping[str, Any]) -> Session:
    """Open ``job`` on the selected backend, once all ranks have said that they mean the same.

    The session's seed is rank 0's. The session is closed when the process ends, if nobody did so.

    Args:
        selection: The backend that runs the job.
        job: What is to be done.
        facts: What else must be the same on all ranks, as JSON can say it.

    Raises:
        DisagreementError: The ranks chose different backends, options or facts.
        PluginError: The backend opened something that is no session.
    """
    chosen = f"{selection.chosen.name!r} of {selection.chosen.origin}"
    options = dict(job.options.get(selection.chosen.name, {}))
    seed = shake_hands(job.environment, {"backend": chosen, "options": options, **facts}, seed=job.seed)
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
    # After an uncaught exception the other ranks are not going to say goodbye with us.
    if session is not None and not hasattr(sys, "last_value"):
        session.close()
