"""Run a request to its end: plan, start, watch, account for it."""

import os
from pathlib import Path

from tp_core.errors import RankFailedError
from tp_core.internal import available_cores

from tp_trainer._launch._plan import make_plan
from tp_trainer._launch._ranks._host_run import LocalRun
from tp_trainer._launch._ranks._log_dir import TemporaryLogs
from tp_trainer._launch._ranks._outcome import Outcome, report, say
from tp_trainer._launch._request import LaunchRequest
from tp_trainer._launch._signals import Stopped, StopSignals

__all__ = ["LaunchRequest", "execute", "run"]

_TEARDOWN_S = 15.0  # at most, from the end of the last rank to that of the launch


def run(request: LaunchRequest) -> int:
    """Run a program on the processes that were asked for, and wait for them.

    What the ranks write appears on stdout and stderr, each line with its rank before it.

    Returns:
        0 when all ranks ended well, 128 + the signal when one asked the launch to end.

    Raises:
        ConfigError: The request cannot work; nothing was started.
        RankFailedError: A rank failed, with the account of the first one; or when the hosts
            did not find each other.

    Example:
        >>> run(LaunchRequest(script="train.py", nproc_per_node=2))  # doctest: +SKIP
        0
    """
    outcome = execute(request)
    if outcome.failure is not None:
        raise RankFailedError(str(outcome.failure))
    if outcome.message and outcome.stopped_by is None:
        raise RankFailedError(outcome.message)
    return outcome.status


def execute(request: LaunchRequest, *, is_program: bool = True) -> Outcome:
    """Run a program as :func:`run` does, with every end of it as a value.

    Args:
        request: What to run.
        is_program: Whether this process is there for the launch alone: it then says what it chose, and
            ends where its main thread comes back from no signal.

    Raises:
        ConfigError: The request cannot work; nothing was started.
    """
    plan = make_plan(request)
    if is_program and "OMP_NUM_THREADS" in plan.env:
        threads = plan.env["OMP_NUM_THREADS"]
        say(f"OMP_NUM_THREADS={threads} for each process ({available_cores()} cores, {plan.nproc} processes)")
    logs = None if request.log_dir is not None else TemporaryLogs()
    log_dir = Path(request.log_dir or "") if logs is None else logs.path

    def leave(outcome: Outcome) -> None:
        # The main thread will not come back from native code, so nobody else can do this.
        clean()
        report(outcome)
        os._exit(outcome.status)

    def leave_stopped(signum: int) -> None:
        local.end(signum)
        leave(local.stopped(signum))

    local = LocalRun(plan, log_dir=log_dir.absolute(), on_unresponsive=leave)

    def clean() -> None:
        local.close()
        if logs is not None:
            logs.remove()

    with StopSignals(
        on_stop=local.end,
        on_hurry=local.kill,
        on_unresponsive=leave_stopped if is_program else None,
        grace_s=request.grace_s + _TEARDOWN_S,
    ) as signals:
        try:
            return local.run()
        except Stopped as stopped:  # between two steps of the run
            return local.stopped(stopped.signum)
        finally:
            signals.ignore()
            clean()
