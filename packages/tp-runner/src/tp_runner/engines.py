"""Building an engine whose workers are elsewhere, in a distribution of its own.

A :class:`FleetEngine` makes a :class:`Fleet`, and the scheduler of tp-runner does the rest: order, retries,
timeouts, restarts, statistics. The engine ``ray`` of tp-ray is one. An engine that brings its own scheduling
implements :class:`tp_core.plugins.Engine` instead, and needs none of these names.

::

    the program's process                       a worker

    FleetEngine.make_fleet
        Fleet.start     check_nesting
                        dump_program, Setup  ->  prepare_process, become_worker, limit_torch
        Fleet.send      Chunk                ->  unpickling, WorkerTask.begin, run_chunk, pack_results
        Fleet.poll      Ready, Done, Died    <-  results, Timing, Failure, log records (handle_records)
        Fleet.close                          ->  end_work, dumps_exit_result
"""

from tp_core.ranks import dumps_by_value

from tp_runner._engines import FleetEngine
from tp_runner._options import Settings
from tp_runner._workers._failure import END, INIT, ITEM, RESULT, Failure
from tp_runner._workers._fleet import (
    Chunk,
    Died,
    Done,
    Event,
    Fleet,
    Ready,
    failure_of_death,
)
from tp_runner._workers._item import WorkerTask, become_worker, set_current_task
from tp_runner._workers._pickling import (
    USERS_ERRORS,
    dump_program,
    dumps_exit_result,
    loads_exit_result,
    pack_results,
)
from tp_runner._workers._setup import (
    HASH_SEED,
    Setup,
    Surroundings,
    check_nesting,
    handle_records,
    limit_torch,
    prepare_process,
    unpickling,
)
from tp_runner._workers._work import Timing, end_work, run_chunk

__all__ = [
    "END",
    "HASH_SEED",
    "INIT",
    "ITEM",
    "RESULT",
    "USERS_ERRORS",
    "Chunk",
    "Died",
    "Done",
    "Event",
    "Failure",
    "Fleet",
    "FleetEngine",
    "Ready",
    "Settings",
    "Setup",
    "Surroundings",
    "Timing",
    "WorkerTask",
    "become_worker",
    "check_nesting",
    "dump_program",
    "dumps_by_value",
    "dumps_exit_result",
    "end_work",
    "failure_of_death",
    "handle_records",
    "limit_torch",
    "loads_exit_result",
    "pack_results",
    "prepare_process",
    "run_chunk",
    "set_current_task",
    "unpickling",
]
