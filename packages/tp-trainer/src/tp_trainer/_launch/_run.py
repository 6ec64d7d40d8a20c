"""Run a request to its end: plan, start, watch, account for it."""

import os
import shutil
import tempfile
from pathlib import Path

from tp_core.errors import RankFailedError

from tp_trainer._launch._local import LocalRun
from tp_trainer._launch._outcome import Outcome, report, say
from tp_trainer._launch._plan import cores, make_plan
from tp_trainer._launch._request import LaunchRequest
from tp_trainer._launch._signals import Stopped, StopSignals

__all__ = ["LaunchRequest", "execute", "run"]

_DEAF_S = 2.0  # how long native code may keep Python from hearing a signal


def run(request: LaunchRequest) -> int:
    """Run a program on the processes that were asked for, and wait for them.

    What the ranks write appears on stdout and stderr, each line with its rank before it.

    Returns:
        0 when all ranks ended well, 128 + the signal when one asked the launch to end.

    Raises:
        ConfigError: When the request cannot work; nothing was started.
        RankFailedError: When a rank failed, with the account of the first one; or when the hosts
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


def execute(request: LaunchRequest) -> Outcome:
    """As ``run``, with every end of it as a value. Only a request that cannot work raises.

    Raises:
        ConfigError: When the request cannot work; nothing was started.
    """
    plan = make_plan(request)
    if "OMP_NUM_THREADS" in plan.env:
        threads = plan.env["OMP_NUM_THREADS"]
        say(f"OMP_NUM_THREADS={threads} for each process ({cores()} cores, {plan.nproc} processes)")
    log_dir = request.log_dir or tempfile.mkdtemp(prefix="tp-launch-")

    def leave(outcome: Outcome) -> None:
        # The main thread will not come back from native code, so nobody else can do this.
        clean()
        report(outcome)
        os._exit(outcome.status)

    local = LocalRun(plan, log_dir=Path(log_dir).absolute(), on_deaf=leave)

    def clean() -> None:
        local.close()
        if request.log_dir is None:
            shutil.rmtree(log_dir, ignore_errors=True)

    def patience_s() -> float:
        return request.grace_s + _DEAF_S if local.has_ranks else _DEAF_S

    with StopSignals(
        patience_s=patience_s, on_deaf=lambda n: leave(Outcome.stopped(n)), pass_on=local.warn
    ) as signals:
        try:
            return local.run()
        except Stopped as stopped:  # between two steps of the run
            return Outcome.stopped(stopped.signum)
        finally:
            signals.ignore()
            clean()
