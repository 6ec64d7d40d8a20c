"""Start a job in the background, and end it."""

import json
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from typing import IO, cast

import psutil
from tp_core.errors import RankFailedError

from tp_trainer._launch._jobs._status import Status, supervisor
from tp_trainer._launch._jobs._store import Job, create_job
from tp_trainer._launch._plan import make_plan
from tp_trainer._launch._request import LaunchRequest

__all__ = ["detach", "stop"]

_START_S = (
    600.0  # against hangs alone: a start from a busy disk may take a minute, and an end is noticed at once
)
_SUPERVISOR_S = 15.0  # how long the supervisor may take after the last of its processes has ended


def detach(request: LaunchRequest, *, command: tuple[str, ...]) -> Job:
    """Start a job that survives this process and its terminal.

    Args:
        request: What to run.
        command: How to show it to people.

    Raises:
        ConfigError: The request cannot work; nothing was started.
        RankFailedError: Its supervisor did not come up.
    """
    make_plan(request)  # what is wrong with it is said here and now, not in a log
    job = create_job(request, command=command)
    with job.log.open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tp_trainer._launch._jobs._supervise", str(job.directory)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,  # the terminal's hang-up and Ctrl-C do not reach it
        )
    with (
        suppress(BrokenPipeError),
        cast("IO[bytes]", process.stdin) as pipe,
    ):  # it has died; that is met below
        pipe.write(json.dumps(request.to_dict()).encode())
    deadline = time.monotonic() + _START_S
    while job.status().state == "starting":
        code = process.poll()
        if code is not None or time.monotonic() > deadline:
            process.kill()
            end = job.log.read_text(errors="replace")[-2000:]
            msg = f"the supervisor of job {job.id} did not start: {end}"
            raise RankFailedError(msg)
        time.sleep(0.02)
    process.returncode = 0  # it is on its own now: Popen must not warn that it still runs
    return job


def stop(job: Job, *, grace_s: float | None) -> Status:
    """End a running job: ask its supervisor, and kill all of its processes after the grace.

    Args:
        job: Which one.
        grace_s: How long it may take; ``None`` is as long as it was launched with, in which it saves.

    Returns:
        Its last status; that of a job which was not running is left as it was.
    """
    deadline = time.monotonic() + _START_S
    while (status := job.status()).state == "starting" and time.monotonic() < deadline:
        time.sleep(0.02)
    process = supervisor(status)
    if process is None or status.state != "running":
        return status
    if grace_s is None:
        grace_s = job.request.grace_s + _SUPERVISOR_S
    tree = _tree(process)
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
        process.kill()  # psutil compares the time of creation first, so no other process is hit
    except psutil.NoSuchProcess:
        return
