"""The background process of a detached job: ``python -m ..._supervise DIRECTORY``, a request on its input."""

import json
import sys
import time
import traceback
from dataclasses import replace
from pathlib import Path

from tp_core.errors import TpError

from tp_trainer._launch._jobs._store import Job, Status, load_job, read_request
from tp_trainer._launch._outcome import Outcome, code_name, report
from tp_trainer._launch._run import execute
from tp_trainer._launch._signals import Stopped, StopSignals


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
            outcome = Outcome.stopped(stopped.signum, "nothing was saved: no rank had been started")
        signals.ignore()  # a second signal would leave the job "running" on the disk
        report(outcome)
        job.write_status(replace(_ended(status, outcome), ended=time.time(), code=outcome.status))
    return outcome.status


def _run(job: Job) -> Outcome:
    try:
        return execute(job.request)
    except TpError as error:
        return Outcome(2, message=str(error))
    except Exception as error:  # noqa: BLE001 - whatever it is, the job must not stay "running"
        traceback.print_exc()
        return Outcome(1, message=f"{type(error).__name__}: {error}")


def _ended(status: Status, outcome: Outcome) -> Status:
    if outcome.stopped_by is not None:
        return replace(status, state="stopped", reason=f"{code_name(-outcome.stopped_by)}; {outcome.account}")
    if outcome.failure is not None:
        failure = outcome.failure
        reason = f"rank {failure.rank}: {code_name(failure.code)}"
        return replace(status, state="failed", reason=reason)
    if outcome.status:
        return replace(status, state="failed", reason=outcome.message)
    return replace(status, state="finished")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
