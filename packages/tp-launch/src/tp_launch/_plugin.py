"""The hook implementation of tp-launch; it imports a command when that is run."""

from collections.abc import Iterable
from typing import Any

from tp_core.plugins import Command, hookimpl

tp_contract = 1


@hookimpl
def tp_commands() -> Iterable[Command]:
    """Return the commands that start jobs and look after them."""
    return [
        Command("launch", "Run a script in several processes, here or on several hosts.", _load_launch),
        Command("jobs", "List the jobs that `tp launch --detach` started.", _load_jobs),
        Command("logs", "Show what a background job has printed.", _load_logs),
        Command("stop", "End a background job.", _load_stop),
    ]


def _load_launch() -> Any:
    from tp_launch._command import launch_app

    return launch_app()


def _load_jobs() -> Any:
    from tp_launch._job_commands import jobs_app

    return jobs_app()


def _load_logs() -> Any:
    from tp_launch._job_commands import logs_app

    return logs_app()


def _load_stop() -> Any:
    from tp_launch._job_commands import stop_app

    return stop_app()
