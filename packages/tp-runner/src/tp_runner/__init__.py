"""A stream of items through one stateful worker per device, in order or as they come.

Example:
    >>> import tp_runner
    >>> list(tp_runner.map(abs, [-1, 2, -3], n_workers=2, engine="thread"))
    [1, 2, 3]

The path of an item through the files::

    OrderedRunner.stream, map, submit        _runner, _map, _executor, _pipeline
        |                                    _options (checked), _engines (which fleet)
        v
    _scheduling/                             whoever waits for results does all of this, for every run
        ItemSource.take                      _source: lists at once, anything else through a thread
        PassState.next_chunk                 _run: order, how many items travel together, who has what
        FleetScheduler.dispatch              _pool: the runs take turns
        |  ^
        v  |  Chunk  /  Done, Ready, Died    _workers/_fleet: all that passes between the two packages
    _workers/
        InlineFleet, ThreadFleet             _thread
        ProcessFleet, WorkerHandle           _processes
            Codec.encode                     _wire;  classes of the main module: _definitions
            Request -> pipe                  large buffers beside the pickle, in _shared_memory
               |  ^
               |  ^                          _start, _fork_server, _setup: how it came to be
               v  |                          _programs: what it runs, in shared memory once for all
            WorkerProcess                    _worker_process;  what it runs: _work
            ReplyWriter                      _wire: results, log records, failures
        |  ^
        v  |
    FleetScheduler._on_events
        a failure, death or timeout          _run: a pure policy; facts in, a decision out
        a worker that has done enough        _run
        PassState.next_finished              in order, or as it comes
        |
        v
    ResultStream, Future, AsyncResultStream  _stream, _scheduling/_source, _async_stream

``_command/`` (``tp run``) uses this package by its public names, and is found by its hook alone. Engines of
other distributions, as tp-ray's, build on ``tp_runner.engines``. easycore's spellings are in
``tp_runner.compat``.
"""

import sys
from typing import TYPE_CHECKING

from tp_core.plugins import lazy_exports

if TYPE_CHECKING:
    from tp_runner import compat as compat
    from tp_runner import errors as errors
    from tp_runner._executor import Executor as Executor
    from tp_runner._executor import register_joblib as register_joblib
    from tp_runner._map import map as map
    from tp_runner._options import RunnerOptions as RunnerOptions
    from tp_runner._pipeline import Pipeline as Pipeline
    from tp_runner._runner import OrderedRunner as OrderedRunner
    from tp_runner._runner import UnorderedRunner as UnorderedRunner
    from tp_runner._stats import RunnerStats as RunnerStats
    from tp_runner._stats import StageStats as StageStats
    from tp_runner._stats import WorkerStats as WorkerStats
    from tp_runner._stream import ResultStream as ResultStream
    from tp_runner._workers._infos import ItemInfo as ItemInfo
    from tp_runner._workers._infos import ItemRng as ItemRng
    from tp_runner._workers._infos import WorkerInfo as WorkerInfo
    from tp_runner._workers._item import item as item
    from tp_runner._workers._item import worker as worker
    from tp_runner._workers._work import CfgNode as CfgNode
    from tp_runner.errors import ItemTimeoutError as ItemTimeoutError
    from tp_runner.errors import NotPicklableError as NotPicklableError
    from tp_runner.errors import RunCancelledError as RunCancelledError
    from tp_runner.errors import RunnerClosedError as RunnerClosedError
    from tp_runner.errors import WorkerDiedError as WorkerDiedError
    from tp_runner.errors import WorkerError as WorkerError

    __version__: str
else:
    __getattr__, __dir__, __all__ = lazy_exports(
        __name__,
        {
            "tp_runner": ["compat", "errors"],
            "tp_runner._executor": ["Executor", "register_joblib"],
            "tp_runner._map": ["map"],
            "tp_runner._options": ["RunnerOptions"],
            "tp_runner._pipeline": ["Pipeline"],
            "tp_runner._runner": ["OrderedRunner", "UnorderedRunner"],
            "tp_runner._stats": ["RunnerStats", "StageStats", "WorkerStats"],
            "tp_runner._stream": ["ResultStream"],
            "tp_runner._workers._infos": ["ItemInfo", "ItemRng", "WorkerInfo"],
            "tp_runner._workers._item": ["item", "worker"],
            "tp_runner._workers._work": ["CfgNode"],
            "tp_runner.errors": [
                "ItemTimeoutError",
                "NotPicklableError",
                "RunCancelledError",
                "RunnerClosedError",
                "WorkerDiedError",
                "WorkerError",
            ],
        },
    )

if sys.platform == "win32":
    from tp_runner._options import warn_of_platform

    warn_of_platform()
