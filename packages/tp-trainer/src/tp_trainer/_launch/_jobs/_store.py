"""Detached jobs on disk: one directory each, written so that a reader never sees half a file.

::

    <state directory>/jobs/<id>/job.json      the request; written once, before the start
    <state directory>/jobs/<id>/status.json   the status; written by the supervisor
    <state directory>/jobs/<id>/log           what the job prints

The files are the user's to change, so a reader checks every field.
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
_LOCK_S = 60.0  # against hangs alone: another process holds the lock for as long as it writes two small files
_MAX_PID = 2**31 - 1
_END_OF_TIME = 253_402_300_800.0  # the year 10000, from which on datetime raises


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """The status of a job, as its supervisor wrote it last.

    Attributes:
        state: "starting", "running", "finished", "failed", "stopped", "lost" when its supervisor
            is gone, or "damaged" when its file cannot be read.
        pid: The process id of the supervisor; while it is starting, of the launch that starts it.
        process: The identity of that process, which no later process with the same id has.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A detached job: its request, and where its files are."""

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
        """Return its status now: one that says "running" holds only while the supervisor is alive."""
        status = self._read_status()
        if status.state in ALIVE and supervisor(status) is None:
            status = self._read_status()  # it may have written its end after the first read
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
    """Return the folder in which this user's jobs are kept.

    ``$TP_STATE_DIR``, else ``$XDG_STATE_HOME/tp``, else ``~/.local/state/tp``.
    """
    if own := os.environ.get("TP_STATE_DIR"):
        return Path(own)
    base = os.environ.get("XDG_STATE_HOME")
    return Path(base, "tp") if base else Path.home() / ".local" / "state" / "tp"


def create_job(request: LaunchRequest, *, command: tuple[str, ...]) -> Job:
    """Write the files of a new job, which this process then starts.

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
        # A lock of the folder: two jobs that start at once must not both find a name free.
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
    """Write a job under another name first: readers find all of it, or nothing."""
    draft = jobs / f".{job.id}"
    draft.mkdir(mode=0o700)
    values = {"id": job.id, "name": job.name, "created": job.created, "cwd": job.cwd}
    # The supervisor gets the arguments as they are through a pipe: on the disk they would outlive the job.
    request = {**asdict(job.request), "args": mask_arguments(job.request.args)}
    more = {"command": mask_arguments(job.command), "request": request}
    write_json(draft / "job.json", {**values, **more})
    write_json(draft / "status.json", asdict(Status.of_this_process("starting")))
    return replace(job, directory=draft.rename(jobs / job.id))


def load_job(directory: Path) -> Job:
    """Return the job that is kept in a directory.

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
    """Return all jobs of this user, the oldest first, without those that cannot be read."""
    return _load_jobs()[0]


def damaged_jobs() -> list[str]:
    """Return a line about each job that cannot be read."""
    return _load_jobs()[1]


def _load_jobs() -> tuple[list[Job], list[str]]:
    directory = state_dir() / "jobs"
    jobs: list[Job] = []
    damaged: list[str] = []
    try:
        # Those that are being written or removed begin with a dot.
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
    """Remove a job and its log."""
    gone = job.directory.with_name(f".{job.id}")  # renamed first: no reader finds half of it
    try:
        job.directory.rename(gone)
    except FileNotFoundError:
        return  # another process has removed it
    shutil.rmtree(gone, ignore_errors=True)


def is_running(job: Job) -> bool:
    """Return whether the supervisor of a job is alive."""
    return job.status().state in ALIVE


def printable(text: str) -> str:
    """Return a text as a terminal may show it: characters that would control it are escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain values into a file; readers find the old one or the new one."""

    def write(part: Path) -> None:
        part.write_text(json.dumps(values, indent=1))

    write_atomically(write, path)


def supervisor(status: Status) -> psutil.Process | None:
    """Return the process that runs the job, or None when it is gone, and its id maybe another's."""
    if identity(status.pid) != status.process:
        return None
    try:
        return psutil.Process(status.pid)
    except psutil.NoSuchProcess:
        return None


def identity(pid: int) -> str | None:
    """Return a text that is unique to the process that has this id now; None if there is none.

    The id alone is not: the kernel gives it to another process later. On Linux the text is the boot and the
    start of the process in ticks since then, which setting the clock does not change.
    """
    if not 0 < pid <= _MAX_PID:
        return None
    try:
        # The name of the program comes second, in parentheses, and may hold any character.
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
    """Return the request that JSON holds; fields of later versions are left out.

    Raises:
        StateError: The values are not those of a request.
        ConfigError: A number is out of range.
    """
    return LaunchRequest(**check_fields(LaunchRequest, values, what="the request"))


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


def check_time(what: str, value: float) -> None:
    """Make sure that a number is a time that people can be shown.

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
    if not path.is_file():  # reading a pipe would wait for whoever writes to it
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
    """Return the values for the fields of a dataclass; others are left out.

    Args:
        kind: The dataclass.
        values: What JSON said.
        what: What to call it in messages.

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
        return type(value) is hint  # True is an int to Python
    return isinstance(value, NoneType if hint is None else hint)


def _name(hint: Any) -> str:
    return hint.__name__ if isinstance(hint, type) else str(hint)
