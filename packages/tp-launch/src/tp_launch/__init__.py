"""Starts the processes of a job, here or on several hosts, and looks after those in the background."""

from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_launch._function import launch as launch
    from tp_launch._launch_plan import LaunchRequest as LaunchRequest
    from tp_launch._local_run import execute as execute
    from tp_launch._outcome import LaunchOutcome as LaunchOutcome
    from tp_launch._outcome import RankFailure as RankFailure

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_launch._function": ["launch"],
            "tp_launch._launch_plan": ["LaunchRequest"],
            "tp_launch._local_run": ["execute"],
            "tp_launch._outcome": ["LaunchOutcome", "RankFailure"],
        },
    )
