"""The commands ``tp jobs``, ``tp logs`` and ``tp stop``, and the start of a job in the background."""

import json
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from typing import IO, Annotated, cast

import psutil
import typer
from rich.table import Table
from rich.text import Text
from tp_core.errors import RankFailedError, StateError
from tp_core.internal import output_console

from tp_trainer._launch._jobs._store import (
    Job,
    Status,
    create_job,
    damaged_jobs,
    find_job,
    is_running,
    list_jobs,
    printable,
    remove_job,
    supervisor,
)
from tp_trainer._launch._plan import LaunchRequest, make_plan

_REF = "The id of the job, the start of it, its name, or 'last'."
_STYLES = {"running": "cyan", "finished": "green", "failed": "red", "lost": "magenta"}
_POLL_S = 0.1
_BLOCK = 1 << 16
# Only against hangs: a start from a busy disk may take a minute. The supervisor's end is noticed at once.
_START_S = 600.0
_SUPERVISOR_S = 15.0  # how long the supervisor may take after the last of its processes has ended


def jobs_app() -> typer.Typer:
    """Return ``tp jobs`` as a separate application."""
    return _app(_jobs)


def logs_app() -> typer.Typer:
    """Return ``tp logs`` as a separate application."""
    return _app(_logs)


def stop_app() -> typer.Typer:
    """Return ``tp stop`` as a separate application."""
    return _app(_stop)


def _app(command: Callable[..., None]) -> typer.Typer:
    app = typer.Typer(add_completion=False)
    app.command()(command)
    return app


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
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
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


def detach(request: LaunchRequest, *, command: tuple[str, ...]) -> Job:
    """Start a job that survives this process and its terminal.

    Args:
        request: The request.
        command: The command, for display.

    Raises:
        ConfigError: The request cannot work; nothing was started.
        RankFailedError: Its supervisor did not come up.
    """
    make_plan(request)  # raises for a mistake here, and not in the job's log
    job = create_job(request, command=command)
    with job.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tp_trainer._launch._jobs._supervise", str(job.directory)],
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

    Args:
        job: The job.
        grace_s: The seconds before it is killed; ``None`` is the grace of its launch, in which it saves.

    Returns:
        Its last status; the status of a job that was not running is unchanged.
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


def _table(jobs: Sequence[Job], *, now: float) -> Table:
    """Return a table with one line per job."""
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
    """Return the log of a job, or its last ``lines`` lines; with ``follow`` until the job has ended.

    Raises:
        StateError: The job has no log.
    """
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
