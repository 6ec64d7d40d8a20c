"""A stream of items through one stateful worker per device, in order or as they come.

Example:
    >>> import tp_runner
    >>> list(tp_runner.map(abs, [-1, 2, -3], devices=2, engine="thread"))
    [1, 2, 3]
"""

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
