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
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tp_core.errors import ConfigError, StateError, TpError
from tp_core.internal import Ownership, write_atomically

from tp_trainer._launch._fields import check_fields, read_json_object
from tp_trainer._launch._jobs._status import ALIVE, Status, check_time, read_status, supervisor
from tp_trainer._launch._request import LaunchRequest
from tp_trainer._secrets import mask_arguments

__all__ = [
    "Job",
    "create_job",
    "damaged_jobs",
    "find_job",
    "is_running",
    "list_jobs",
    "load_job",
    "printable",
    "remove_job",
    "state_dir",
    "write_values",
]

_NEWEST = "last"
_TURN_S = 60.0  # against hangs alone: another process has the folder as long as it writes two small files


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

    def status(self) -> Status:
        """Return its status now, which is known from its process where it has one."""
        status = self._read_status()
        if status.state in ALIVE and supervisor(status) is None:
            status = self._read_status()  # it may have written its end between our two looks
            if status.state in ALIVE and supervisor(status) is None:
                return replace(status, state="lost")
        return status

    def _read_status(self) -> Status:
        try:
            return read_status(self.directory / "status.json")
        except StateError as error:
            return Status(state="damaged", pid=0, process="", started=self.created, reason=str(error))

    def write_status(self, status: Status) -> None:
        """Put a new status in the place of the old one."""
        write_values(self.directory / "status.json", asdict(status))

    def to_dict(self) -> dict[str, Any]:
        """Return the job and its status, for ``tp jobs --json``."""
        status = self.status()
        return {
            "id": self.id,
            "name": self.name,
            "state": status.state,
            "status": status.code,
            "reason": status.reason,
            "pid": status.pid or None,
            "created": self.created,
            "started": status.started,
            "ended": status.ended,
            "cwd": self.cwd,
            "command": list(self.command),
            "log": str(self.log),
        }


def state_dir() -> Path:
    """Return the folder in which this user's jobs are kept.

    ``$TP_STATE_DIR``, else ``$XDG_STATE_HOME/tp``, else ``~/.local/state/tp``.
    """
    if own := os.environ.get("TP_STATE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_STATE_HOME")
    return Path(base, "tp") if base else Path.home() / ".local" / "state" / "tp"


def create_job(request: LaunchRequest, *, command: tuple[str, ...]) -> Job:
    """Write down a new job, which this process is to start.

    Raises:
        ConfigError: Its name is taken by a running job, or means something else; or jobs cannot be
            kept in the state directory.
    """
    name = request.name or Path(request.script).stem
    if request.name is not None and (
        request.name == _NEWEST or not request.name.strip() or not request.name.isprintable()
    ):
        msg = (
            f"--name {request.name!r} cannot be used; a name has printable characters, and 'last' means "
            "the newest job"
        )
        raise ConfigError(msg)
    jobs = state_dir() / "jobs"
    job = Job(
        id=uuid.uuid4().hex[:8],
        name=name,
        created=time.time(),
        cwd=str(Path.cwd()),
        command=command,
        request=request,
        directory=jobs,
    )
    try:
        jobs.mkdir(parents=True, exist_ok=True)
        jobs.chmod(0o700)
        # Two jobs that start at once must not both find a name free.
        with Ownership(jobs, is_folder=True, grace_s=_TURN_S):
            if request.name is not None and any(j.name == name and is_running(j) for j in list_jobs()):
                msg = f"a job named {name!r} is running; choose another --name, or end it: tp stop {name}"
                raise ConfigError(msg)
            return _write_job(job, jobs)
    except OSError as error:
        msg = (
            f"jobs cannot be kept in {jobs}: {error.strerror or error}; set TP_STATE_DIR to a directory "
            "that you can write to"
        )
        raise ConfigError(msg) from error


def _write_job(job: Job, jobs: Path) -> Job:
    """Write a job beside its place first: others find all of it, or nothing."""
    draft = jobs / f".{job.id}"
    draft.mkdir(mode=0o700)
    values = {"id": job.id, "name": job.name, "created": job.created, "cwd": job.cwd}
    # The supervisor gets the arguments as they are through a pipe: on the disk they would outlive the job.
    request = {**job.request.to_dict(), "args": mask_arguments(job.request.args)}
    more = {"command": mask_arguments(job.command), "request": request}
    write_values(draft / "job.json", {**values, **more})
    write_values(draft / "status.json", asdict(Status.of_this_process("starting")))
    return replace(job, directory=draft.rename(jobs / job.id))


def load_job(directory: Path) -> Job:
    """Return the job that is kept in a directory.

    Raises:
        StateError: Its file is missing or damaged.
    """
    try:
        values = read_json_object(directory / "job.json")
        request = LaunchRequest.from_dict(values.get("request"))
        kept = check_fields(Job, {**values, "request": request, "directory": directory}, what="the job")
        if kept["id"] != directory.name:
            msg = f"id of the job must be that of its directory, got {kept['id']!r:.80}"
            raise StateError(msg)
        check_time("created of the job", kept["created"])
        return Job(**kept)
    except TpError as error:
        msg = f"{directory} holds no readable job: {error}; delete it"
        raise StateError(msg) from error


def list_jobs() -> list[Job]:
    """Return all jobs of this user, the oldest first; what cannot be read is left out."""
    jobs = []
    for directory in _directories():
        try:
            jobs.append(load_job(directory))
        except StateError:
            continue  # it is named by `damaged_jobs`
    return sorted(jobs, key=lambda job: job.created)


def damaged_jobs() -> list[str]:
    """Return a line about each job that cannot be read."""
    lines = []
    for directory in _directories():
        try:
            load_job(directory)
        except StateError as error:
            lines.append(str(error))
    return lines


def _directories() -> list[Path]:
    jobs = state_dir() / "jobs"
    try:
        return sorted(path for path in jobs.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return []
    except OSError as error:
        msg = f"jobs cannot be read from {jobs}: {error.strerror or error}"
        raise ConfigError(msg) from error


def find_job(ref: str) -> Job:
    """Return the job that is meant by an id, the start of an id, a name, or "last".

    Several jobs of one name: the running one, or else the newest.

    Raises:
        ConfigError: No job or several match; the message lists all jobs.
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
    known = ", ".join(f"{job.id} ({printable(job.name)})" for job in (found or jobs)[-10:])
    msg = f"{what}; {'they are' if found else 'there are'}: {known or 'none at all'}"
    raise ConfigError(msg)


def remove_job(job: Job) -> None:
    """Forget a job and its log."""
    gone = job.directory.with_name(f".{job.id}")  # nobody finds half of it
    try:
        job.directory.rename(gone)
    except FileNotFoundError:
        return  # somebody else has removed it
    shutil.rmtree(gone, ignore_errors=True)


def is_running(job: Job) -> bool:
    """Whether its supervisor is alive."""
    return job.status().state in ALIVE


def printable(text: str) -> str:
    """Return a text as a terminal may show it: characters that would control it are escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def write_values(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain values into a file; readers find the old one or the new one."""

    def write(part: Path) -> None:
        part.write_text(json.dumps(values, indent=1))

    write_atomically(write, path)
