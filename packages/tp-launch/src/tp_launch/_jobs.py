"""Jobs in the background, as their files describe them.

A job is a launch in a process of its own, its supervisor, which outlives the terminal::

    <state directory>/jobs/<id>/job.json      what was started; written once, before the start
    <state directory>/jobs/<id>/status.json   the status; written by the supervisor
    <state directory>/jobs/<id>/log           what the job prints
"""

import os
import shutil
import time
import uuid
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import psutil
from tp_core.errors import ConfigError, StateError
from tp_core.files import Ownership
from tp_core.secrets import mask_arguments

from tp_launch._json_records import check_fields, check_time, read_json_object, write_json
from tp_launch._launch_plan import LaunchRequest

_ALIVE = ("starting", "running")
_STATES = (*_ALIVE, "finished", "failed", "stopped")
_NEWEST = "last"
_LOCK_S = 60.0  # only against hangs: another process holds the lock while it writes two small files
_MAX_PID = 2**31 - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """The last status that a job's supervisor wrote.

    Attributes:
        state: "starting", "running", "finished", "failed", "stopped", "lost" if its supervisor is gone,
            "damaged" if its file is, or "unreadable" if it cannot be read now.
        pid: The process id of the supervisor; while the job is starting, of the launch that starts it.
        process: The identity of that process; a later process with the same id has another one.
        started: The time of the start, in seconds since 1970.
        ended: The time of the end, if it has ended.
        code: The exit status, if it has ended.
        reason: Why it ended, if not well.
    """

    state: str
    pid: int
    process: str
    started: float
    ended: float | None = None
    code: int | None = None
    reason: str = ""

    @classmethod
    def of_this_process(cls, state: str) -> Self:
        """Return the status of a job that this process starts or supervises."""
        pid = os.getpid()
        return cls(state=state, pid=pid, process=process_identity(pid) or "", started=time.time())

    @classmethod
    def read(cls, path: Path) -> Self:
        """Return the status in a file.

        Raises:
            OSError: It cannot be read now.
            StateError: It is damaged.
        """
        status = cls(**check_fields(cls, read_json_object(path), what="the status"))
        if status.state not in _STATES:
            msg = f"state of the status must be one of {_STATES}, got {status.state!r:.80}"
            raise StateError(msg)
        check_time("started of the status", status.started)
        check_time("ended of the status", status.ended or 0.0)
        return status

    def supervisor(self) -> psutil.Process | None:
        """Return the supervisor's process, or None if it is gone, even if another process has its id."""
        if process_identity(self.pid) != self.process:
            return None
        try:
            return psutil.Process(self.pid)
        except psutil.NoSuchProcess:
            return None


@dataclass(frozen=True, slots=True, kw_only=True)
class DetachedJob:
    """A job in the background.

    Attributes:
        id: Eight hexadecimal digits.
        name: Its name for people; the stem of the script if none was given.
        created: The time at which it was made, in seconds since 1970.
        cwd: The working directory of the launch.
        command: The program and its arguments, with secrets masked.
        grace_s: Seconds that its processes may take to end when asked to.
        directory: The directory of its files.
    """

    id: str
    name: str
    created: float
    cwd: str
    command: tuple[str, ...]
    grace_s: float
    directory: Path

    @property
    def log(self) -> Path:
        return self.directory / "log"

    def status(self) -> JobStatus:
        """Return the current status: "running" becomes "lost" if the supervisor is gone."""
        status = self._read_status()
        if status.state in _ALIVE and status.supervisor() is None:
            status = self._read_status()  # the supervisor may have ended normally since the first read
            if status.state in _ALIVE and status.supervisor() is None:
                return replace(status, state="lost")
        return status

    def _read_status(self) -> JobStatus:
        try:
            return JobStatus.read(self.directory / "status.json")
        except (OSError, StateError) as error:
            if isinstance(error, StateError):
                state = "damaged"
            else:
                state = "unreadable"
            return JobStatus(state=state, pid=0, process="", started=self.created, reason=str(error))

    def write_status(self, status: JobStatus) -> None:
        write_json(self.directory / "status.json", asdict(status))

    def is_running(self) -> bool:
        return self.status().state in _ALIVE

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
    if base:
        return Path(base, "tp")
    return Path.home() / ".local" / "state" / "tp"


def create_job(request: LaunchRequest) -> DetachedJob:
    """Write the files of a job that is about to start.

    Raises:
        ConfigError: The name cannot be used, or a running job has it; or jobs cannot be kept.
    """
    if request.name is not None:
        _check_name(request.name)
    name = request.name or Path(request.script).stem
    jobs = state_dir() / "jobs"
    job = DetachedJob(
        id=uuid.uuid4().hex[:8],
        name=name,
        created=time.time(),
        cwd=str(Path.cwd()),
        # Masked: on disk, secrets would outlive the job. The supervisor gets the real ones through a pipe.
        command=tuple(mask_arguments(request.command)),
        grace_s=request.grace_s,
        directory=jobs,
    )
    try:
        jobs.mkdir(parents=True, exist_ok=True)
        jobs.chmod(0o700)
        # A lock on the folder: two jobs that start at once must not both see that a name is free.
        with Ownership(jobs, is_folder=True, grace_s=_LOCK_S):
            if request.name is not None and any(j.name == name and j.is_running() for j in list_jobs()):
                msg = f"a job named {name!r} is running; choose another --name, or end it: tp stop {name}"
                raise ConfigError(msg)
            return _write_job(job, jobs)
    except OSError as error:
        msg = (
            f"jobs cannot be kept in {jobs}: {error.strerror or error}; set TP_STATE_DIR to a directory "
            "that you can write to"
        )
        raise ConfigError(msg) from error


def _check_name(name: str) -> None:
    if name == _NEWEST or not name.strip() or not name.isprintable():
        msg = (
            f"--name {name!r} cannot be used; a name has printable characters, and 'last' means "
            "the newest job"
        )
        raise ConfigError(msg)


def _write_job(job: DetachedJob, jobs: Path) -> DetachedJob:
    """Write a job into a draft and rename it: readers see all of it, or nothing."""
    draft = jobs / f".{job.id}"
    draft.mkdir(mode=0o700)
    values = asdict(job)
    del values["directory"]
    write_json(draft / "job.json", values)
    write_json(draft / "status.json", asdict(JobStatus.of_this_process("starting")))
    return replace(job, directory=draft.rename(jobs / job.id))


def load_job(directory: Path) -> DetachedJob:
    """Return the job of a directory.

    Raises:
        OSError: Its file cannot be read now.
        StateError: It is damaged.
    """
    try:
        values = {**read_json_object(directory / "job.json"), "directory": directory}
        job = DetachedJob(**check_fields(DetachedJob, values, what="the job"))
        if job.id != directory.name:
            msg = f"id of the job must be its directory's, got {job.id!r:.80}"
            raise StateError(msg)
        check_time("created of the job", job.created)
    except StateError as error:
        msg = f"{directory} holds no readable job: {error}; delete it"
        raise StateError(msg) from error
    return job


def list_jobs() -> list[DetachedJob]:
    """Return this user's jobs, the oldest first, without those that cannot be read."""
    return _load_jobs()[0]


def damaged_jobs() -> list[str]:
    """Return a sentence about each job that cannot be read."""
    return _load_jobs()[1]


def _load_jobs() -> tuple[list[DetachedJob], list[str]]:
    directory = state_dir() / "jobs"
    jobs: list[DetachedJob] = []
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
        except OSError as error:
            damaged.append(f"{path} cannot be read: {error}")
    return sorted(jobs, key=lambda job: job.created), damaged


def find_job(ref: str) -> DetachedJob:
    """Return the job with an id, the start of an id, a name, or "last".

    Of several jobs with one name it is the running one, or else the newest.

    Raises:
        ConfigError: There is none, or there are several.
    """
    jobs, left_out = _load_jobs()
    if ref == _NEWEST and jobs:
        return jobs[-1]
    matches = _matching_jobs(jobs, ref)
    if len(matches) == 1:
        return matches[0]
    if matches:
        msg = f"{ref!r} may mean several jobs; they are: {_listed(matches)}"
    else:
        msg = f"there is no job {ref!r}; there are: {_listed(jobs) or 'none at all'}"
        msg = "; ".join([msg, *left_out])
    raise ConfigError(msg)


def _matching_jobs(jobs: Sequence[DetachedJob], ref: str) -> list[DetachedJob]:
    same_id = [job for job in jobs if job.id == ref]
    if same_id:
        return same_id
    named = [job for job in jobs if job.name == ref]
    if named:
        return [job for job in named if job.is_running()] or named[-1:]
    return [job for job in jobs if ref and job.id.startswith(ref)]


def _listed(jobs: Sequence[DetachedJob]) -> str:
    return ", ".join(f"{job.id} ({printable(job.name)})" for job in jobs[-10:])


def remove_job(job: DetachedJob) -> None:
    """Remove the files of a job."""
    removed = job.directory.with_name(f".{job.id}")  # renamed first, so that no reader sees half of it
    try:
        job.directory.rename(removed)
    except FileNotFoundError:
        return  # another process has removed it
    shutil.rmtree(removed, ignore_errors=True)


def printable(text: str) -> str:
    """Return a text that is safe for a terminal: control characters are escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def process_identity(pid: int) -> str | None:
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
    is_over = fields[0] in "ZX"  # its parent has not collected it yet
    if is_over:
        return None
    return f"{boot}/{fields[19]}"


def _portable_identity(pid: int) -> str | None:
    try:
        process = psutil.Process(pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        return f"created/{process.create_time():.2f}"
    except psutil.NoSuchProcess:
        return None
