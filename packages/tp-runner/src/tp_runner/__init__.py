"""A stream of items through one stateful worker per device, in order or as they come.

Example:
    >>> import tp_runner
    >>> list(tp_runner.map(abs, [-1, 2, -3], n_workers=2, engine="thread"))
    [1, 2, 3]

The way of an item, and the files that it passes::

    OrderedRunner.stream, map, submit        _runner, _map, _executor, _pipeline
        |                                    _devices, _options (checked), _engines (which fleet)
        v
    _scheduling/                             whoever waits for results does all of this, for every run
        Source.take                          _source: lists at once, anything else through a thread
        Run.next_chunk                       _run: order;  _chunking: how many items travel together
        Scheduler.dispatch                   _scheduler: the runs take turns;  _assignments: who has what
        |  ^
        v  |  Chunk  /  Done, Ready, Died    _workers/_fleet: all that passes between the two rooms
    _workers/
        InlineFleet, ThreadFleet             _inline, _thread
        RayFleet                             _ray/
        ProcessFleet                         _process/_fleet, _handle
            Codec.encode                     _codec: into shared memory, large buffers beside the pickle;
                                             _definitions: what of the main module a worker is told
            Request -> pipe, shared memory   _wire, _shared_memory
               |  ^
               |  ^                          _spawn, _forkserver: how the process came to be; _setup
               v  |                          _shared_memory: what it runs, there once for all
            WorkerProcess                    _worker;  what it runs: ../_program, ../_work, ../_batching
            ReplyWriter                      _codec: results, log records, failures
        |  ^
        v  |
    Scheduler._on_events
        a failure, death or timeout          _retries: a pure policy; facts in, a decision out
        a worker that has done enough        _assignments
        Run.next_finished                    in order, or as it comes
        |
        v
    ResultStream, Future, AsyncResultStream  _stream, _scheduling/_futures, _async_stream

``tp run`` is in ``tp_runner._command``; easycore's spellings are in ``tp_runner.compat``.
"""

import sys

from tp_core.internal import exports_of_stub

__getattr__, __dir__, __all__ = exports_of_stub(__name__)

if sys.platform == "win32":
    from tp_runner._devices import warn_of_platform

    warn_of_platform()
