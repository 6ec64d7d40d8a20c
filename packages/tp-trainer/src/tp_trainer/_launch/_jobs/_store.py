"""Detached jobs on disk: one directory each, written so that a reader never sees an incomplete file.

::

    <state directory>/jobs/<id>/job.json      the request; written once, before the start
    <state directory>/jobs/<id>/status.json   the status; written by the supervisor
    <state directory>/jobs/<id>/log           what the job prints

Users may change the files, so a reader checks every field.
"""

import json
import math
import os
import shutil
import time
import uuid
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, fields, replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import psutil
from tp_core.errors import ConfigError, StateError, TpError
from tp_core.internal import Ownership, write_atomically

from tp_trainer._launch._plan import LaunchRequest
from tp_trainer._secrets import mask_arguments

ALIVE = ("starting", "running")
_STATES = (*ALIVE, "finished", "failed", "stopped")
_NEWEST = "last"
_LOCK_S = 60.0  # only against hangs: another process holds the lock while it writes two small files
_MAX_PID = 2**31 - 1
_END_OF_TIME = 253_402_300_800.0  # the year 10000, for which datetime raises


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The last status that a job's supervisor wrote.

    Attributes:
        state: "starting", "running", "finished", "failed", "stopped", "lost" if its supervisor is gone,
            or "damaged" if its file cannot be read.
        pid: The process id of the supervisor; while the job is starting, of the launch that starts it.
        process: The identity of that process; a later process with the same id has another one.
        started: The time of the start, in seconds since 1970.
        ended: The time of the end, or None.
        code: The exit status, or None.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A detached job: its request, and the directory of its files."""

    id: str
    name: str
    created: float
    cwd: str
    command: tuple[str, ...]
    request: LaunchRequest
    directory: Path

    @property
    def log(self) -> Path:
        """The file with the output of the job."""
        return self.directory / "log"

    def status(self) -> Status:
        """Return the current status: "running" becomes "lost" if the supervisor is gone."""
        status = self._read_status()
        if status.state in ALIVE and supervisor(status) is None:
            status = self._read_status()  # the supervisor may have ended normally since the first read
            if status.state in ALIVE and supervisor(status) is None:
                return replace(status, state="lost")
        return status

    def _read_status(self) -> Status:
        try:
            return read_status(self.directory / "status.json")
        except StateError as error:
            return Status(state="damaged", pid=0, process="", started=self.created, reason=str(error))

    def write_status(self, status: Status) -> None:
        """Replace the status."""
        write_json(self.directory / "status.json", asdict(status))

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
    """Return the folder of this user's jobs.

    ``$TP_STATE_DIR``, else ``$XDG_STATE_HOME/tp``, else ``~/.local/state/tp``.
    """
    if own := os.environ.get("TP_STATE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_STATE_HOME")
    return Path(base, "tp") if base else Path.home() / ".local" / "state" / "tp"


def create_job(request: LaunchRequest, *, command: tuple[str, ...]) -> Job:
    """Write the files of a new job.

    Raises:
        ConfigError: Its name is taken by a running job, or is reserved; or the state directory is not
            writable.
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
        # A lock on the folder: two jobs that start at once must not both find the same name free.
        with Ownership(jobs, is_folder=True, grace_s=_LOCK_S):
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
    """Write a job into a draft and rename it: readers find all of it, or nothing."""
    draft = jobs / f".{job.id}"
    draft.mkdir(mode=0o700)
    values = {"id": job.id, "name": job.name, "created": job.created, "cwd": job.cwd}
    # Masked: the supervisor gets the real arguments through a pipe. On disk, secrets would outlive the job.
    request = {**asdict(job.request), "args": mask_arguments(job.request.args)}
    more = {"command": mask_arguments(job.command), "request": request}
    write_json(draft / "job.json", {**values, **more})
    write_json(draft / "status.json", asdict(Status.of_this_process("starting")))
    return replace(job, directory=draft.rename(jobs / job.id))


def load_job(directory: Path) -> Job:
    """Return the job of a directory.

    Raises:
        StateError: Its file is missing or damaged.
    """
    try:
        values = read_json_object(directory / "job.json")
        request = read_request(values.get("request"))
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
    """Return all readable jobs of this user, oldest first."""
    return _load_jobs()[0]


def damaged_jobs() -> list[str]:
    """Return a line about each unreadable job."""
    return _load_jobs()[1]


def _load_jobs() -> tuple[list[Job], list[str]]:
    directory = state_dir() / "jobs"
    jobs: list[Job] = []
    damaged: list[str] = []
    try:
        # Names with a dot in front are of jobs that are being written or removed.
        paths = sorted(path for path in directory.iterdir() if not path.name.startswith("."))
    except FileNotFoundError:
        return jobs, damaged
    except OSError as error:
        msg = f"jobs cannot be read from {directory}: {error.strerror or error}"
        raise ConfigError(msg) from error
    for path in paths:
        try:
            jobs.append(load_job(path))
        except StateError as error:
            damaged.append(str(error))
    return sorted(jobs, key=lambda job: job.created), damaged


def find_job(ref: str) -> Job:
    """Return the job with an id, the start of an id, a name, or "last".

    Of several jobs with one name it is the running one, or else the newest.

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
    """Remove a job and its log."""
    gone = job.directory.with_name(f".{job.id}")  # renamed first, so that no reader finds half of it
    try:
        job.directory.rename(gone)
    except FileNotFoundError:
        return  # another process has removed it
    shutil.rmtree(gone, ignore_errors=True)


def is_running(job: Job) -> bool:
    """Return whether the supervisor of a job is alive."""
    return job.status().state in ALIVE


def printable(text: str) -> str:
    """Return a text that is safe for a terminal: control characters are escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain values into a file; readers find the old or the new contents."""

    def write(part: Path) -> None:
        part.write_text(json.dumps(values, indent=1))

    write_atomically(write, path)


def supervisor(status: Status) -> psutil.Process | None:
    """Return the supervisor's process, or None if it is gone, even if another process has its id."""
    if identity(status.pid) != status.process:
        return None
    try:
        return psutil.Process(status.pid)
    except psutil.NoSuchProcess:
        return None


def identity(pid: int) -> str | None:
    """Return a text that is unique to the process with this id; None if there is no such process.

    The kernel reuses ids. On Linux the text is the boot's id and the start of the process in ticks since
    boot, which setting the clock does not change.
    """
    if not 0 < pid <= _MAX_PID:
        return None
    try:
        # The second field is the program's name in parentheses, which may contain ")" and spaces.
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except ProcessLookupError:
        return None
    except OSError:
        return _portable_identity(pid)
    return None if fields[0] in "ZX" else f"{boot}/{fields[19]}"


def _portable_identity(pid: int) -> str | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"created/{process.create_time():.2f}"
    except psutil.NoSuchProcess:
        return None


def read_request(values: object) -> LaunchRequest:
    """Return the request of a JSON object; fields of later versions are ignored.

    Raises:
        StateError: The values are not a request.
        ConfigError: A number is out of range.
    """
    return LaunchRequest(**check_fields(LaunchRequest, values, what="the request"))


def read_status(path: Path) -> Status:
    """Return the status in a file.

    Raises:
        StateError: The file is missing or damaged.
    """
    status = Status(**check_fields(Status, read_json_object(path), what="the status"))
    if status.state not in _STATES:
        msg = f"state of the status must be one of {_STATES}, got {status.state!r:.80}"
        raise StateError(msg)
    check_time("started of the status", status.started)
    check_time("ended of the status", status.ended or 0.0)
    return status


def check_time(what: str, value: float) -> None:
    """Make sure that a number is a time that datetime can show.

    Raises:
        StateError: The value is not a time.
    """
    if not 0 <= value < _END_OF_TIME:
        msg = f"{what} must be in seconds since 1970, got {value!r:.80}"
        raise StateError(msg)


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file.

    Raises:
        StateError: The file does not exist, or holds something else.
    """
    if not path.is_file():  # reading a pipe would block
        msg = f"{path} is not a file"
        raise StateError(msg)
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        msg = f"{path} cannot be read: {error}"
        raise StateError(msg) from error
    if not isinstance(values, dict):
        msg = f"{path} must hold an object, got {type(values).__name__}"
        raise StateError(msg)
    return values


def check_fields(kind: type, values: object, *, what: str) -> dict[str, Any]:
    """Return the values for the fields of a dataclass; other values are ignored.

    Args:
        kind: The dataclass.
        values: The values from JSON.
        what: The name of the object in messages.

    Raises:
        StateError: A value is missing or of another type than its field.
    """
    if not isinstance(values, Mapping):
        msg = f"{what} must be an object, got {type(values).__name__}"
        raise StateError(msg)
    hints = get_type_hints(kind)
    kept: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in values:
            value = values[field.name]
            if not _fits(value, hints[field.name]):
                msg = f"{field.name} of {what} must be {_name(hints[field.name])}, got {value!r:.80}"
                raise StateError(msg)
            kept[field.name] = tuple(value) if isinstance(value, list) else value
        elif field.default is MISSING and field.default_factory is MISSING:
            msg = f"{what} has no {field.name}"
            raise StateError(msg)
    return kept


def _fits(value: object, hint: Any) -> bool:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        return any(_fits(value, arg) for arg in args)
    if origin is tuple:
        return isinstance(value, list | tuple) and all(_fits(item, args[0]) for item in value)
    if origin is Mapping:
        return isinstance(value, Mapping) and all(_fits(item, args[1]) for item in value.values())
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]  # it is a number
    if hint in (int, str, bool):
        return type(value) is hint  # isinstance(True, int) is true
    return isinstance(value, NoneType if hint is None else hint)


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
