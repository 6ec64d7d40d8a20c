"""Detached jobs on disk: one directory each, written so that a reader never sees half a file.

::

    <state directory>/jobs/<id>/job.json      what was asked for; written once, before the start
    <state directory>/jobs/<id>/status.json   how it goes; written by the supervisor
    <state directory>/jobs/<id>/log           what the job prints
"""

import json
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import psutil
from tp_core.errors import ConfigError, StateError

from tp_trainer._launch._request import LaunchRequest

_NEWEST = "last"


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """How a job goes.

    Attributes:
        state: "running", "finished", "failed", "stopped", or "lost" when its supervisor vanished.
        pid: The process id of the supervisor.
        pid_created: When that process was created, so that no later one can be taken for it.
        started: When the supervisor started, in seconds since 1970.
        ended: When it ended, or None.
        code: Its exit status, or None.
        reason: A line about a failure.
    """

    state: str
    pid: int
    pid_created: float
    started: float
    ended: float | None = None
    code: int | None = None
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A detached job as it was asked for."""

    id: str
    name: str
    created: float
    cwd: str
    command: tuple[str, ...]
    request: LaunchRequest
    directory: Path

    @property
    def log(self) -> Path:
        """The file that everything it prints goes to."""
        return self.directory / "log"

    def status(self) -> Status | None:
        """How it goes; None before its supervisor has said a word."""
        values = _read(self.directory / "status.json")
        if values is None:
            return None
        known = {f.name for f in fields(Status)}
        status = Status(**{name: value for name, value in values.items() if name in known})
        if status.state == "running" and supervisor(status) is None:
            # It may have written its end between our two looks.
            values = _read(self.directory / "status.json") or values
            if values["state"] == "running":
                values = {**values, "state": "lost"}
            status = Status(**{name: value for name, value in values.items() if name in known})
        return status

    def write_status(self, status: Status) -> None:
        """Put a new status in the place of the old one."""
        write_json(self.directory / "status.json", asdict(status))

    def to_dict(self) -> dict[str, Any]:
        """The job and its status, for ``tp jobs --json``."""
        status = self.status()
        return {
            "id": self.id,
            "name": self.name,
            "state": "lost" if status is None else status.state,
            "status": None if status is None else status.code,
            "reason": "" if status is None else status.reason,
            "pid": None if status is None else status.pid,
            "created": self.created,
            "started": None if status is None else status.started,
            "ended": None if status is None else status.ended,
            "cwd": self.cwd,
            "command": list(self.command),
            "log": str(self.log),
        }


def state_dir() -> Path:
    """Where this user's jobs are kept.

    ``$TP_STATE_DIR``, else ``$XDG_STATE_HOME/tp``, else ``~/.local/state/tp``.
    """
    if own := os.environ.get("TP_STATE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_STATE_HOME")
    return Path(base, "tp") if base else Path.home() / ".local" / "state" / "tp"


def create_job(request: LaunchRequest, *, command: tuple[str, ...]) -> Job:
    """Write down a new job, which nothing runs yet.

    Raises:
        ConfigError: When its name is taken by a running job, or means something else.
    """
    name = request.name or Path(request.script).stem
    if request.name is not None:
        if request.name == _NEWEST or not request.name.strip():
            raise ConfigError(f"--name {request.name!r} cannot be used; 'last' means the newest job")
        if any(job.name == name and is_running(job) for job in list_jobs()):
            raise ConfigError(
                f"a job named {name!r} is running; choose another --name, or end it: tp stop {name}"
            )
    job_id = uuid.uuid4().hex[:8]
    directory = state_dir() / "jobs" / job_id
    directory.mkdir(parents=True, mode=0o700)
    job = Job(
        id=job_id,
        name=name,
        created=time.time(),
        cwd=str(Path.cwd()),
        command=command,
        request=request,
        directory=directory,
    )
    values = {"id": job.id, "name": job.name, "created": job.created, "cwd": job.cwd}
    more = {"command": list(command), "request": request.to_dict()}
    write_json(directory / "job.json", {**values, **more})
    return job


def load_job(directory: Path) -> Job:
    """The job that is kept in a directory.

    Raises:
        StateError: When its file is missing or damaged.
    """
    values = _read(directory / "job.json")
    try:
        if values is None:
            raise KeyError("job.json")
        return Job(
            id=values["id"],
            name=values["name"],
            created=values["created"],
            cwd=values["cwd"],
            command=tuple(values["command"]),
            request=LaunchRequest.from_dict(values["request"]),
            directory=directory,
        )
    except (KeyError, TypeError) as error:
        raise StateError(f"{directory} holds no readable job: {error}; delete it") from error


def list_jobs() -> list[Job]:
    """All jobs of this user, the oldest first; what cannot be read is left out."""
    jobs = []
    for directory in sorted((state_dir() / "jobs").glob("*")):
        try:
            jobs.append(load_job(directory))
        except StateError:
            continue  # just being created or removed
    return sorted(jobs, key=lambda job: job.created)


def find_job(ref: str) -> Job:
    """The job that is meant by an id, the start of an id, a name, or "last".

    Several jobs of one name: the running one, or else the newest.

    Raises:
        ConfigError: When none or several are meant; it lists the jobs there are.
    """
    jobs = list_jobs()
    if ref == _NEWEST and jobs:
        return jobs[-1]
    named = [job for job in jobs if job.name == ref]
    found = [job for job in jobs if job.id == ref] or [job for job in named if is_running(job)]
    found = found or named[-1:] or [job for job in jobs if ref and job.id.startswith(ref)]
    if len(found) == 1:
        return found[0]
    what = f"{ref!r} may mean several jobs" if found else f"there is no job {ref!r}"
    known = ", ".join(f"{job.id} ({job.name})" for job in (found or jobs)[-10:])
    raise ConfigError(f"{what}; {'they are' if found else 'there are'}: {known or 'none at all'}")


def remove_job(job: Job) -> None:
    """Forget a job and its log."""
    shutil.rmtree(job.directory, ignore_errors=True)


def is_running(job: Job) -> bool:
    """Whether its supervisor is alive."""
    status = job.status()
    return status is not None and status.state == "running"


def supervisor(status: Status) -> psutil.Process | None:
    """The process that runs the job, or None when it has gone, its id maybe reused."""
    try:
        process = psutil.Process(status.pid)
        if abs(process.create_time() - status.pid_created) > 0.01:
            return None
        return process if process.status() != psutil.STATUS_ZOMBIE else None
    except psutil.NoSuchProcess:
        return None


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a file as a whole: readers find the old one or the new one."""
    draft = path.with_name(f"{path.name}.{os.getpid()}.part")
    draft.write_text(json.dumps(values, indent=1))
    draft.replace(path)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None
