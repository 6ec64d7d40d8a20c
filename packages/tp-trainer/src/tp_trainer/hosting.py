"""Names for programs that start ranks, or open sessions, by themselves: another launcher, or another trainer.

A launch is a :class:`LaunchRequest`, which :func:`execute` runs to its :class:`Outcome`. A session is opened
on the backend that :func:`tp_core.discovery.select` chooses.
"""

from typing import TYPE_CHECKING

from tp_core.internal import lazy_exports

if TYPE_CHECKING:
    from tp_trainer._launch._outcome import Failure as Failure
    from tp_trainer._launch._outcome import Outcome as Outcome
    from tp_trainer._launch._outcome import report as report
    from tp_trainer._launch._plan import LaunchRequest as LaunchRequest
    from tp_trainer._launch._run import execute as execute
    from tp_trainer._launch._signals import Stopped as Stopped
    from tp_trainer._launch._signals import StopSignals as StopSignals
    from tp_trainer._opening._session import open_session as open_session
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_trainer._launch._outcome": ["Failure", "Outcome", "report"],
            "tp_trainer._launch._plan": ["LaunchRequest"],
            "tp_trainer._launch._run": ["execute"],
            "tp_trainer._launch._signals": ["StopSignals", "Stopped"],
            "tp_trainer._opening._session": ["open_session"],
        },
    )
