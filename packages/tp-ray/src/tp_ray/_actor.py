"""One actor: it makes the worker's program, applies it to chunks, and says what came of it."""

import importlib
import logging
import pickle
import time
from typing import Any, NamedTuple

from tp_core.errors import ConfigError
from tp_runner.engines import (
    END,
    INIT,
    ITEM,
    USERS_ERRORS,
    Failure,
    Setup,
    Timing,
    WorkerTask,
    become_worker,
    dumps_by_value,
    dumps_exit_result,
    end_work,
    limit_torch,
    pack_results,
    prepare_process,
    run_chunk,
    set_current_task,
    unpickling,
)


def import_ray() -> Any:
    """Return the module of Ray.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        msg = "engine 'ray' needs Ray; pip install tp-ray"
        raise ConfigError(msg) from error


class ChunkPlace(NamedTuple):
    """The place of a chunk's first item in the input, its run, and how often it was sent before."""

    start: int
    run: int
    attempt: int


class Started(NamedTuple):
    """The answer of an actor after its start, with a pickled failure if it has failed."""

    failure: bytes
    records: list[logging.LogRecord]
    node: str


class Answer(NamedTuple):
    """The answer to a chunk: its pickled results, and the log records up to now."""

    results: bytes
    has_failures: bool
    timing: Timing
    records: list[logging.LogRecord]


class Ended(NamedTuple):
    """The answer of an actor after its end: a pickled failure, or the pickled value of the end."""

    failure: bytes
    returned: bytes
    records: list[logging.LogRecord]


class RayWorker:
    """One actor. It takes and returns bytes, so that pickling errors are ours and not Ray's."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._records: list[logging.LogRecord] = []
        self._work: Any = None
        self._task = WorkerTask(setup.settings, [0, 0, 0], ())
        set_current_task(self._task, of_process=True)
        self._waiting = time.monotonic()

    def ready(self) -> Started:
        ray = import_ray()
        failure = b""
        try:
            prepare_process(self._setup, self._records.append)
            with unpickling:
                program = pickle.loads(self._setup.program)
            limit_torch(self._setup.threads)  # the program may have imported torch just now
            become_worker(self._setup.info)
            self._work = program(self._setup.device)
        except BaseException as error:  # noqa: BLE001 - the caller raises whatever it is
            failure = pickle.dumps(Failure.of(error, INIT), 5)
        node = ray.get_runtime_context().get_node_id()
        where = f"node {node[:8]} ({ray.util.get_node_ip_address()})"
        return Started(failure, self._take_records(), where)

    def work(self, data: bytes, n_items: int, place: ChunkPlace) -> Answer:
        began = time.monotonic()
        waited_s = began - self._waiting
        try:
            with unpickling:
                items = pickle.loads(data)
        except USERS_ERRORS as error:
            results, failed = [Failure.of(error, ITEM)] * n_items, True
        else:
            self._task.begin(*place)
            results, failed = run_chunk(self._work, items, self._task)
        worked_s = time.monotonic() - began
        data, _, unpicklable = pack_results(results, packed)
        self._waiting = time.monotonic()
        return Answer(data, failed or unpicklable, Timing(began, waited_s, worked_s), self._take_records())

    def end(self) -> Ended:
        failure = returned = b""
        try:
            returned = dumps_exit_result(end_work(self._work))
        except BaseException as error:  # noqa: BLE001 - the caller raises whatever it is
            failure = pickle.dumps(Failure.of(error, END), 5)
        return Ended(failure, returned, self._take_records())

    def _take_records(self) -> list[logging.LogRecord]:
        records = self._records[:]
        del self._records[: len(records)]  # in place: the handler appends to this very list
        return records


def packed(obj: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle an object, with definitions that its receiver cannot import; without buffers apart."""
    return dumps_by_value(obj, protocol=5), []
