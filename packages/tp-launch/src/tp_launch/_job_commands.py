"""The commands ``tp jobs``, ``tp logs`` and ``tp stop``, for typer."""

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime
from typing import Annotated

import typer
from rich.table import Table
from rich.text import Text
from tp_core.errors import StateError
from tp_core.output import output_console

from tp_launch._jobs import DetachedJob, damaged_jobs, find_job, list_jobs, printable, remove_job
from tp_launch._supervisor import stop_job

_REF = "The id of the job, the start of it, its name, or 'last'."
_STYLES = {"running": "cyan", "finished": "green", "failed": "red", "lost": "magenta"}
_BLOCK_NBYTES = 1 << 16
_POLL_S = 0.1


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
        _clear()
    jobs = list_jobs()
    if as_json:
        typer.echo(json.dumps([job.to_dict() for job in jobs], indent=2))
    elif jobs:
        output_console().print(_table(jobs, now=time.time()))
    else:
        typer.echo("no jobs; tp launch --detach starts one", err=True)


def _clear() -> None:
    ended = 0
    for job in list_jobs():
        # A job whose status nobody knows may be running.
        if job.status().state not in {"damaged", "unreadable"} and not job.is_running():
            remove_job(job)
            ended += 1
    typer.echo(f"removed {ended} ended jobs", err=True)


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
    detached = find_job(job)
    if (state := detached.status()).state == "unreadable":
        msg = f"whether job {detached.id} runs cannot be read: {state.reason}; nothing was ended"
        raise StateError(msg)
    was_running = detached.is_running()
    status = stop_job(detached, grace_s=grace_s)
    if as_json:
        typer.echo(json.dumps({**detached.to_dict(), "was_running": was_running}, indent=2))
        return
    if status.reason:
        end = f"{status.state} ({status.reason})"
    else:
        end = status.state
    if not was_running:
        end = f"was not running: {end}"
    typer.echo(f"{detached.id} {end}")


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


def _table(jobs: Sequence[DetachedJob], *, now: float) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in ("ID", "NAME", "STATE", "STARTED", "ELAPSED"):
        table.add_column(title, no_wrap=True)
    table.add_column("COMMAND", overflow="fold")
    for job in jobs:
        status = job.status()
        state = status.state
        until = status.ended
        if until is None and state == "running":
            until = now
        if state == "failed":
            words = f"failed({status.code})"
        else:
            words = state
        if until is None:
            duration = "-"
        else:
            duration = elapsed(until - status.started)
        table.add_row(
            Text(job.id),
            Text(printable(job.name)),
            Text(words, style=_STYLES.get(state, "")),
            datetime.fromtimestamp(status.started).strftime("%Y-%m-%d %H:%M:%S"),  # local, for people
            duration,
            Text(printable(shlex.join(job.command))),
        )
    return table


def elapsed(seconds: float) -> str:
    """Return ``75.2`` as ``1:15``, and hours or days when there are some."""
    minutes, rest = divmod(int(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if hours or days:
        clock = f"{hours}:{minutes:02}:{rest:02}"
    else:
        clock = f"{minutes}:{rest:02}"
    if days:
        return f"{days}d {clock}"
    return clock


def log_chunks(job: DetachedJob, *, follow: bool, lines: int | None) -> Iterator[bytes]:
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
            is_over = not follow or not job.is_running()  # before the read, so that the last lines are read
            while chunk := file.read(_BLOCK_NBYTES):
                yield chunk
            if is_over:
                return
            time.sleep(_POLL_S)


def _start_of_last(text: bytes, lines: int) -> int:
    if not lines:
        return len(text)
    start = len(text) - text.endswith(b"\n")
    for _ in range(lines):
        start = text.rfind(b"\n", 0, start)
        if start < 0:
            return 0
    return start + 1
