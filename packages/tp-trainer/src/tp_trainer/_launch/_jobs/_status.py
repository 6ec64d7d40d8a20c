"""How a detached job goes, and whether the process that says so is still there."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

import psutil
from tp_core.errors import StateError

from tp_trainer._launch._fields import check_fields, read_json_object
from tp_trainer._launch._jobs._process import find_process, identity

__all__ = ["ALIVE", "Status", "check_time", "read_status", "supervisor"]

ALIVE = ("starting", "running")
_STATES = (*ALIVE, "finished", "failed", "stopped")
_END_OF_TIME = 253_402_300_800.0  # the year 10000, with which datetime can do nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a job goes.

    Attributes:
        state: "starting", "running", "finished", "failed", "stopped", "lost" when its supervisor
            vanished, or "damaged" when its file cannot be read.
        pid: The process id of the supervisor; while it is starting, of the launch that starts it.
        process: The identity of that process, so that no later one can be taken for it.
        started: When it started, in seconds since 1970.
        ended: When it ended, or None.
        code: Its exit status, or None.
        reason: A line about a failure.
    """

    state: str
    pid: int
    process: str
    started: float
    ended: float | None = None
    code: int | None = None
    reason: str = ""

    @classmethod
    def of_this_process(cls, state: str) -> "Status":
        """Return the status of a job that this process starts or supervises."""
        pid = os.getpid()
        return cls(state=state, pid=pid, process=identity(pid) or "", started=time.time())


def read_status(path: Path) -> Status:
    """Return the status that a file holds.

    Raises:
        StateError: The file of the status is missing or damaged.
    """
    status = Status(**check_fields(Status, read_json_object(path), what="the status"))
    if status.state not in _STATES:
        msg = f"state of the status must be one of {_STATES}, got {status.state!r:.80}"
        raise StateError(msg)
    check_time("started of the status", status.started)
    check_time("ended of the status", status.ended or 0.0)
    return status


def supervisor(status: Status) -> psutil.Process | None:
    """Return the process that runs the job, or None when it has gone, its id maybe reused."""
    return find_process(status.pid, status.process)


def check_time(what: str, value: float) -> None:
    """Make sure that a number is a time that people can be shown.

    Raises:
        StateError: The value is not a time.
    """
    if not 0 <= value < _END_OF_TIME:
        msg = f"{what} must be in seconds since 1970, got {value!r:.80}"
        raise StateError(msg)
