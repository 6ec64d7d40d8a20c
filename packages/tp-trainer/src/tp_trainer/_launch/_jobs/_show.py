"""How jobs look in a terminal."""

import shlex
import time
from collections.abc import Iterator, Sequence
from datetime import datetime

from rich.table import Table
from rich.text import Text
from tp_core.errors import StateError
from tp_core.internal import output_console

from tp_trainer._launch._jobs._store import Job, is_running, printable

__all__ = ["elapsed", "jobs_table", "log_chunks", "print_jobs"]

_POLL_S = 0.1
_BLOCK = 1 << 16
_STYLES = {"running": "cyan", "finished": "green", "failed": "red", "lost": "magenta"}


def jobs_table(jobs: Sequence[Job], *, now: float) -> Table:
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


def print_jobs(jobs: Sequence[Job]) -> None:
    """Print the table."""
    output_console().print(jobs_table(jobs, now=time.time()))


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
            over = not follow or not is_running(job)  # asked first: what it wrote last is read below
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
