"""What runs in each actor on a Ray cluster: the work, and log records that go back with its results."""

import logging
import pickle
import time
from typing import Any

from tp_runner._workers._failure import END, INIT, ITEM, Failure
from tp_runner._workers._fleet import dumps_ending
from tp_runner._workers._identity import become
from tp_runner._workers._item import Task, work_here
from tp_runner._workers._pickling import USERS_ERRORS, pack_what_can_be
from tp_runner._workers._ray._placement import import_ray
from tp_runner._workers._setup import Setup, limit_torch, prepare
from tp_runner._workers._work import end_work, run_chunk

__all__ = ["Answer", "RayWorker", "packed"]

Answer = tuple[bytes, bool, tuple[float, float, float], list[logging.LogRecord]]
"""What the work on a chunk comes to: the pickled results, whether some are failures, when it began,
how long the worker had waited for it and worked on it, and the log records up to now."""


class RayWorker:
    """One worker; speaks in bytes, so that errors are ours and not Ray's."""

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._records: list[logging.LogRecord] = []
        self._work: Any = None
        self._task = Task(setup.settings, [0, 0, 0], ())
        work_here(self._task, of_process=True)
        self._waiting = time.monotonic()

    def ready(self) -> tuple[bytes, list[logging.LogRecord], str]:
        """Start the program; return its failure, if there is one, log records, and where this is."""
        ray = import_ray()
        failure = b""
        try:
            prepare(self._setup, self._records.append)
            program = pickle.loads(self._setup.program)
            limit_torch(self._setup.threads)  # it may have been imported just now
            become(self._setup.info)
            self._work = program(self._setup.device)
        except BaseException as error:  # noqa: BLE001 - the caller raises whatever it is
            failure = pickle.dumps(Failure.of(error, INIT), 5)
        node = ray.get_runtime_context().get_node_id()
        return failure, self._taken_records(), f"node {node[:8]} ({ray.util.get_node_ip_address()})"

    def work(self, data: bytes, n_items: int, place: tuple[int, int, int]) -> Answer:
        """Work on a chunk; ``place`` is that of its first item, its run, and how often it was sent before."""
        began = time.monotonic()
        waited_s = began - self._waiting
        try:
            items = pickle.loads(data)
        except USERS_ERRORS as error:
            results, failed = [Failure.of(error, ITEM)] * n_items, True
        else:
            self._task.begin(*place)
            results, failed = run_chunk(self._work, items, self._task)
        worked_s = time.monotonic() - began
        data, _, unpicklable = pack_what_can_be(results, packed)
        self._waiting = time.monotonic()
        return data, failed or unpicklable, (began, waited_s, worked_s), self._taken_records()

    def end(self) -> tuple[bytes, bytes, list[logging.LogRecord]]:
        """End the program; return its failure, if there is one, what it returned, and log records."""
        failure = returned = b""
        try:
            returned = dumps_ending(end_work(self._work))
        except BaseException as error:  # noqa: BLE001 - the caller raises whatever it is
            failure = pickle.dumps(Failure.of(error, END), 5)
        return failure, returned, self._taken_records()

    def _taken_records(self) -> list[logging.LogRecord]:
        records = self._records[:]
        del self._records[: len(records)]  # in place: the handler keeps this very list
        return records


def packed(obj: Any) -> tuple[bytes, list[memoryview]]:
    """Pickle an object by itself, with what its receiver cannot import."""
    import cloudpickle

    return cloudpickle.dumps(obj, protocol=5), []
