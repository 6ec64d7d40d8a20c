"""Jobs in the background: ``tp jobs``, ``tp logs``, ``tp stop``, and what ``tp launch --detach`` starts.

A job is a launch in a process of its own, its supervisor, which outlives the terminal. Its files are written
so that a reader never sees an incomplete one::

    <state directory>/jobs/<id>/job.json      the request; written once, before the start
    <state directory>/jobs/<id>/status.json   the status; written by the supervisor
    <state directory>/jobs/<id>/log           what the job prints

Users may change the files, so a reader checks every field.
"""

import json
import math
import os
import shlex
import shutil
import subprocess
import sys
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import MISSING, asdict, dataclass, fields, replace
from datetime import datetime
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import IO, Annotated, Any, Union, cast, get_args, get_origin, get_type_hints

import psutil
import typer
from rich.table import Table
from rich.text import Text
from tp_core.errors import ConfigError, RankFailedError, StateError, TpError
from tp_core.internal import Ownership, atomic_part, output_console
from tp_core.secrets import mask_arguments

from tp_launch._launch_plan import LaunchRequest
from tp_launch._local_run import execute
from tp_launch._outcome import LaunchOutcome, report
from tp_launch._stop_signals import Stopped, StopSignals

# -- Jobs on disk ---------------------------------------------------------------------------------


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
    try:
        values = read_json_object(directory / "job.json")
        request = read_request(values.get("request"))
        found = check_fields(Job, {**values, "request": request, "directory": directory}, what="the job")
        if found["id"] != directory.name:
            msg = f"id of the job must be its directory's, got {found['id']!r:.80}"
            raise StateError(msg)
        check_time("created of the job", found["created"])
        return Job(**found)
    except TpError as error:
        msg = f"{directory} holds no readable job: {error}; delete it"
        raise StateError(msg) from error


def list_jobs() -> list[Job]:
    return _load_jobs()[0]


def damaged_jobs() -> list[str]:
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
    gone = job.directory.with_name(f".{job.id}")  # renamed first, so that no reader finds half of it
    try:
        job.directory.rename(gone)
    except FileNotFoundError:
        return  # another process has removed it
    shutil.rmtree(gone, ignore_errors=True)


def is_running(job: Job) -> bool:
    return job.status().state in ALIVE


def printable(text: str) -> str:
    """Return a text that is safe for a terminal: control characters are escaped."""
    return "".join(char if char.isprintable() else ascii(char)[1:-1] for char in text)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write plain values into a file; readers find the old or the new contents."""
    with atomic_part(path) as part:
        part.write_text(json.dumps(values, indent=1))


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
    """Return the request of a JSON object; fields of later versions are ignored."""
    return LaunchRequest(**check_fields(LaunchRequest, values, what="the request"))


def read_status(path: Path) -> Status:
    status = Status(**check_fields(Status, read_json_object(path), what="the status"))
    if status.state not in _STATES:
        msg = f"state of the status must be one of {_STATES}, got {status.state!r:.80}"
        raise StateError(msg)
    check_time("started of the status", status.started)
    check_time("ended of the status", status.ended or 0.0)
    return status


def check_time(what: str, value: float) -> None:
    """Make sure that a number is a time that datetime can show."""
    if not 0 <= value < _END_OF_TIME:
        msg = f"{what} must be in seconds since 1970, got {value!r:.80}"
        raise StateError(msg)


def read_json_object(path: Path) -> dict[str, Any]:
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
    """Return the values for the fields of a dataclass; other values are ignored."""
    if not isinstance(values, Mapping):
        msg = f"{what} must be an object, got {type(values).__name__}"
        raise StateError(msg)
    hints = get_type_hints(kind)
    found: dict[str, Any] = {}
    for field in fields(kind):
        if field.name in values:
            value = values[field.name]
            if not _fits(value, hints[field.name]):
                msg = f"{field.name} of {what} must be {_name(hints[field.name])}, got {value!r:.80}"
                raise StateError(msg)
            found[field.name] = tuple(value) if isinstance(value, list) else value
        elif field.default is MISSING and field.default_factory is MISSING:
            msg = f"{what} has no {field.name}"
            raise StateError(msg)
    return found


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


# -- Starting and ending a job ---------------------------------------------------------------------


_POLL_S = 0.1
# Only against hangs: a start from a busy disk may take a minute. The supervisor's end is noticed at once.
_START_S = 600.0
_SUPERVISOR_S = 15.0  # how long the supervisor may take after the last of its processes has ended


def start_job(request: LaunchRequest, *, command: tuple[str, ...]) -> Job:
    """Start a job that survives this process and its terminal.

    Raises:
        ConfigError: The request cannot work; nothing was started.
    """
    request.check()  # raises for a mistake here, and not in the job's log
    job = create_job(request, command=command)
    with job.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(job.directory)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # otherwise the terminal's SIGHUP and Ctrl-C would reach it
        )
    # Through a pipe: arguments may be secrets. If the process has died, the loop below notices.
    with suppress(BrokenPipeError), cast("IO[bytes]", process.stdin) as pipe:
        pipe.write(json.dumps(asdict(request)).encode())
    deadline = time.monotonic() + _START_S
    while job.status().state == "starting":
        code = process.poll()
        if code is not None or time.monotonic() > deadline:
            process.kill()
            end = job.log.read_text(errors="replace")[-2000:]
            msg = f"the supervisor of job {job.id} did not start: {end}"
            raise RankFailedError(msg)
        time.sleep(0.02)
    process.returncode = 0  # the job outlives this process: Popen would warn that it still runs
    return job


def stop_job(job: Job, *, grace_s: float | None) -> Status:
    """End a running job: ask its supervisor, and kill all of its processes after the grace.

    By default it is the grace of its launch, in which it saves. Returns its last status, unchanged for a
    job that was not running.
    """
    deadline = time.monotonic() + _START_S
    while (status := job.status()).state == "starting" and time.monotonic() < deadline:
        time.sleep(0.02)
    process = supervisor(status)
    if process is None or status.state != "running":
        return status
    if grace_s is None:
        grace_s = job.request.grace_s + _SUPERVISOR_S
    tree = _tree(process)  # before the signal: the children of a process that has exited cannot be found
    try:
        process.terminate()
    except psutil.NoSuchProcess:
        tree = []
    _, alive = psutil.wait_procs([process], timeout=grace_s)
    if alive:
        tree = list({*tree, *_tree(process)})
        for member in tree:
            _kill(member)
        psutil.wait_procs(tree, timeout=5)
        ended = replace(status, state="stopped", reason="SIGKILL", ended=time.time(), code=137)
        job.write_status(ended)
    return job.status()


def _tree(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()  # psutil compares creation times first: a later process with the same id is safe
    except psutil.NoSuchProcess:
        return


# -- The commands ---------------------------------------------------------------------------------


_REF = "The id of the job, the start of it, its name, or 'last'."
_STYLES = {"running": "cyan", "finished": "green", "failed": "red", "lost": "magenta"}
_BLOCK = 1 << 16


def _jobs(
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
    clear: Annotated[
        bool, typer.Option("--clear", help="Forget the jobs that have ended, and their logs.")
    ] = False,
) -> None:
    """List the detached jobs."""
    for line in damaged_jobs():
        typer.echo(f"tp jobs: left out: {line}", err=True)
    if clear:
        # Not jobs with a damaged status: they may be running.
        known = [job for job in list_jobs() if job.status().state != "damaged"]
        ended = [job for job in known if not is_running(job)]
        for job in ended:
            remove_job(job)
        typer.echo(f"removed {len(ended)} ended jobs", err=True)
    found = list_jobs()
    if as_json:
        typer.echo(json.dumps([job.to_dict() for job in found], indent=2))
    elif found:
        output_console().print(_table(found, now=time.time()))
    else:
        typer.echo("no jobs; tp launch --detach starts one", err=True)


def _logs(
    job: Annotated[str, typer.Argument(help=_REF)],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Continue until the job has ended.")] = False,
    lines: Annotated[int | None, typer.Option("--lines", "-n", min=0, help="Only the last lines.")] = None,
) -> None:
    """Print what a detached job has written."""
    for chunk in log_chunks(find_job(job), follow=follow, lines=lines):
        sys.stdout.buffer.write(chunk)
        sys.stdout.buffer.flush()


def _stop(
    job: Annotated[str, typer.Argument(help=_REF)],
    grace_s: Annotated[
        float | None,
        typer.Option(
            min=0.0, help="Seconds before all of its processes are killed; as launched if not given."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """End a detached job and all of its processes."""
    found = find_job(job)
    was_running = is_running(found)
    status = stop_job(found, grace_s=grace_s)
    if as_json:
        typer.echo(json.dumps({**found.to_dict(), "was_running": was_running}, indent=2))
        return
    end = f"{status.state} ({status.reason})" if status.reason else status.state
    typer.echo(f"{found.id} {'' if was_running else 'was not running: '}{end}")


def _app(command: Callable[..., None]) -> typer.Typer:
    """Return a command as a separate application."""
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return app


jobs_app, logs_app, stop_app = partial(_app, _jobs), partial(_app, _logs), partial(_app, _stop)


def _table(jobs: Sequence[Job], *, now: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("ID", "NAME", "STATE", "STARTED", "ELAPSED"):
        table.add_column(title, no_wrap=True)
    table.add_column("COMMAND", overflow="fold")
    for job in jobs:
        values = job.to_dict()
        state = values["state"]
        shown = f"failed({values['status']})" if state == "failed" else state
        started = values["started"]
        until = values["ended"] or (now if state == "running" else None)
        table.add_row(
            Text(job.id),
            Text(printable(job.name)),
            Text(shown, style=_STYLES.get(state, "")),
            datetime.fromtimestamp(started).strftime("%Y-%m-%d %H:%M:%S"),  # local, for people
            "-" if until is None else elapsed(until - started),
            Text(printable(shlex.join(job.command))),
        )
    return table


def elapsed(seconds: float) -> str:
    """Return ``75.2`` as ``1:15``, and hours or days when there are some."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    clock = f"{hours}:{minutes:02}:{rest:02}" if hours or days else f"{minutes}:{rest:02}"
    return f"{days}d {clock}" if days else clock


def log_chunks(job: Job, *, follow: bool, lines: int | None) -> Iterator[bytes]:
    """Return the log of a job, or its last ``lines`` lines; with ``follow`` until the job has ended."""
    try:
        log = job.log.open("rb")
    except OSError as error:
        msg = f"the log of job {job.id} cannot be read: {error}"
        raise StateError(msg) from error
    with log as file:
        if lines is not None:
            file.seek(_start_of_last(file.read(), lines))
        while True:
            over = not follow or not is_running(job)  # before the read, so that the last lines are read
            while chunk := file.read(_BLOCK):
                yield chunk
            if over:
                return
            time.sleep(_POLL_S)


def _start_of_last(text: bytes, lines: int) -> int:
    at = len(text) - text.endswith(b"\n")
    for _ in range(lines):
        at = text.rfind(b"\n", 0, at)
        if at < 0:
            return 0
    return at + 1 if lines else len(text)


# -- The supervisor: ``python -m tp_launch._jobs DIRECTORY``, a request on its input --------------


def main(directory: str) -> int:
    """Run the job of a directory, and write its status there."""
    request = read_request(json.load(sys.stdin.buffer))  # with unmasked arguments, which no file has
    job = replace(load_job(Path(directory)), request=request)
    status = Status.of_this_process("running")
    job.write_status(status)
    with StopSignals() as signals:
        try:
            outcome = _run(job)
        except Stopped as stopped:  # outside of the handlers of the launch
            outcome = LaunchOutcome.stopped(stopped.signum, "nothing was saved: no rank had been started")
        signals.ignore()  # a second signal would leave the job "running" on the disk
        report(outcome)
        ended = replace(status, state=outcome.state, reason=outcome.reason, code=outcome.status)
        job.write_status(replace(ended, ended=time.time()))
    return outcome.status


def _run(job: Job) -> LaunchOutcome:
    try:
        return execute(job.request)
    except TpError as error:
        return LaunchOutcome(2, message=str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the job must not stay "running"
        traceback.print_exc()
        return LaunchOutcome(1, message=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
