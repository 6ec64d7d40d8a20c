"""The supervisor of a job in the background: its start, its work, and its end.

It is the process ``python -P -m tp_launch._supervisor DIRECTORY``, and reads the request from its input.
"""

import json
import subprocess
import sys
import time
import traceback
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, cast

import psutil
from tp_core.errors import RankFailedError, TpError

from tp_launch._jobs import DetachedJob, JobStatus, create_job, load_job
from tp_launch._launch_plan import LaunchRequest, make_plan
from tp_launch._local_run import execute
from tp_launch._outcome import LaunchOutcome, report
from tp_launch._stop_signals import Stopped, StopSignals

# Only against hangs: a start from a busy disk may take a minute. The supervisor's end is noticed at once.
_START_S = 600.0
_SUPERVISOR_S = 15.0  # how long the supervisor may take after the last of its processes has ended
_POLL_S = 0.02
_KILL_S = 5.0  # how long processes may take to be gone after SIGKILL


def start_job(request: LaunchRequest) -> DetachedJob:
    """Start a job that survives this process and its terminal.

    Raises:
        ConfigError: The request cannot work; nothing was started.
        RankFailedError: The supervisor ended at once.
    """
    make_plan(request)  # raises for a mistake here, and not in the job's log
    job = create_job(request)
    job.log.touch(mode=0o600)  # a program prints its arguments at times
    with job.log.open("wb") as log:
        process = subprocess.Popen(
            # -P: no modules of the current folder in the place of Python's own.
            [sys.executable, "-P", "-m", __name__, str(job.directory)],
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
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            end = job.log.read_text(errors="replace")[-2000:]
            msg = f"the supervisor of job {job.id} did not start: {end}"
            raise RankFailedError(msg)
        time.sleep(_POLL_S)
    process.returncode = 0  # the job outlives this process: Popen would warn that it still runs
    return job


def stop_job(job: DetachedJob, *, grace_s: float | None) -> JobStatus:
    """End a running job: ask its supervisor, and kill all of its processes after the grace.

    By default it is the grace of its launch, in which it saves. Returns its last status, unchanged for a
    job that was not running.
    """
    deadline = time.monotonic() + _START_S
    while (status := job.status()).state == "starting" and time.monotonic() < deadline:
        time.sleep(_POLL_S)
    process = status.supervisor()
    if process is None or status.state != "running":
        return status
    if grace_s is None:
        grace_s = job.grace_s + _SUPERVISOR_S
    tree = _process_tree(process)  # before the signal: the children of a process that has exited are unknown
    try:
        process.terminate()
    except psutil.NoSuchProcess:
        tree = []
    _, alive = psutil.wait_procs([process], timeout=grace_s)
    if alive:
        tree = list({*tree, *_process_tree(process)})
        for member in tree:
            _kill(member)
        psutil.wait_procs(tree, timeout=_KILL_S)
        job.write_status(replace(status, state="stopped", reason="SIGKILL", ended=time.time(), code=137))
    return job.status()


def _process_tree(process: psutil.Process) -> list[psutil.Process]:
    try:
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()  # psutil compares creation times first: a later process with the same id is safe
    except psutil.NoSuchProcess:
        return


def main(directory: Path) -> int:
    """Run the job of a directory, and write its status there."""
    job = load_job(directory)
    values = json.load(sys.stdin.buffer)
    values["args"] = tuple(values["args"])
    request = LaunchRequest(**values)
    status = JobStatus.of_this_process("running")
    job.write_status(status)
    with StopSignals() as signals:
        try:
            outcome = _run(request)
        except Stopped as stopped:  # outside of the handlers of the launch
            outcome = LaunchOutcome.stopped(stopped.signum, "nothing was saved: no rank had been started")
        signals.ignore()  # a second signal would leave the job "running" on the disk
        report(outcome)
        ended = replace(status, state=outcome.state, reason=outcome.reason, code=outcome.status)
        job.write_status(replace(ended, ended=time.time()))
    return outcome.status


def _run(request: LaunchRequest) -> LaunchOutcome:
    try:
        return execute(request)
    except TpError as error:
        return LaunchOutcome(2, message=str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the job must not stay "running"
        traceback.print_exc()
        return LaunchOutcome(1, message=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
