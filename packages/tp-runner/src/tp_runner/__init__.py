"""A stream of items through one stateful worker per device, in order or as they come.

Example:
    >>> import tp_runner
    >>> list(tp_runner.map(abs, [-1, 2, -3], devices=2, engine="thread"))
    [1, 2, 3]
"""

from typing import TYPE_CHECKING

from tp_core import lazy_exports

if TYPE_CHECKING:
    from tp_runner._calls import map  # noqa: A004 - what the builtin is, on several workers
    from tp_runner._cfg import CfgNode
    from tp_runner._errors import (
        ItemTimeout,
        NotPicklableError,
        RunCancelled,
        RunnerBusy,
        RunnerClosed,
        WorkerDied,
        WorkerError,
    )
    from tp_runner._runner import OrderedRunner, UnorderedRunner
    from tp_runner._stats import RunnerStats, WorkerStats
    from tp_runner._stream import ResultStream

__all__ = [
    "CfgNode",
    "ItemTimeout",
    "NotPicklableError",
    "OrderedRunner",
    "ResultStream",
    "RunCancelled",
    "RunnerBusy",
    "RunnerClosed",
    "RunnerStats",
    "UnorderedRunner",
    "WorkerDied",
    "WorkerError",
    "WorkerStats",
    "map",
]

if not TYPE_CHECKING:
    __getattr__, __dir__ = lazy_exports(
        __name__,
        {
            "_calls": ["map"],
            "_cfg": ["CfgNode"],
            "_errors": [
                "ItemTimeout",
                "NotPicklableError",
                "RunCancelled",
                "RunnerBusy",
                "RunnerClosed",
                "WorkerDied",
                "WorkerError",
            ],
            "_runner": ["OrderedRunner", "UnorderedRunner"],
            "_stats": ["RunnerStats", "WorkerStats"],
            "_stream": ["ResultStream"],
        },
    )
