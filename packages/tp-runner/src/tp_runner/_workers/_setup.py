"""Set up a worker process before the user's code runs: device, threads, logging, environment."""

import contextlib
import ctypes
import logging
import os
import pickle
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

from tp_runner._options import Settings
from tp_runner._workers._item import WorkerInfo
from tp_runner._workers._pickling import USERS_ERRORS, explain_not_picklable
from tp_runner.errors import NotPicklableError


def handle_records(records: Iterable[logging.LogRecord]) -> None:
    """Give a worker's records to the parent's loggers of their names."""
    for record in records:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


class RecordForwarder(logging.Handler):
    """Sends records to the parent, with the worker and its device."""

    def __init__(self, worker: int, device: str, send_record: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._worker = worker
        self._device = device
        self._send_record = send_record

    def emit(self, record: logging.LogRecord) -> None:
        """Send ``record``; what cannot be pickled in it becomes text."""
        try:
            record.msg, record.args = record.getMessage(), None
            if record.exc_info:
                formatter = self.formatter or logging.Formatter()
                record.exc_text = formatter.formatException(record.exc_info)
                record.exc_info = None
            record.worker = self._worker
            record.device = self._device
            self._send_record(record)
        except Exception:  # noqa: BLE001 - logging's own way: a record never ends the program
            self.handleError(record)


DEPTH_VARIABLE = "TP_RUNNER_DEPTH"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
# Opening the C library anew takes longer; and it is found once for all workers that are forked.
_MALLOPT = getattr(ctypes.pythonapi, "mallopt", None)


@dataclass(frozen=True, slots=True)
class Setup:
    """Everything that a worker needs before its first chunk.

    Attributes:
        program: What it runs, or its pickle.
        device: Its device.
        worker: Its number.
        count: How many workers there are.
        settings: How the runner is run.
    """

    program: Any
    device: str
    worker: int
    count: int
    settings: Settings

    @property
    def info(self) -> WorkerInfo:
        """The part that user code can ask for."""
        return WorkerInfo(self.worker, self.count, self.device, self.settings.seed)

    @property
    def threads(self) -> int:
        """The number of threads that it may compute with."""
        settings = self.settings
        if settings.threads is None and settings.cpus is not None:
            return len(settings.cpus[self.worker])
        return settings.threads or 1

    def pickled(self) -> bytes:
        """Return this with what a process needs to be like this one before it unpickles it.

        A fork server is as old as the first runner: its directory and environment are those of then.

        Raises:
            NotPicklableError: The function that makes batches cannot be pickled.
        """
        surroundings = Surroundings.of_this_process(self.settings.env)
        try:
            return pickle.dumps((surroundings, pickle.dumps(self, 5)), 5)
        except USERS_ERRORS as error:  # all else in it is plain, or bytes
            collate = self.settings.batching and self.settings.batching.collate
            msg = f"{explain_not_picklable(collate, 'collate', error)}; it must travel to the workers"
            raise NotPicklableError(msg) from error


class Surroundings(NamedTuple):
    """The state of a process that a worker takes over from its parent.

    Attributes:
        path: Where modules are looked for.
        folder: The working directory.
        environment: The variables.
        argv: The arguments of the program.
        main_file: Where its main module came from, if it has a file.
        authkey: What processes of multiprocessing know each other by; ``None`` if it is not used.
    """

    path: list[str]
    folder: str
    environment: dict[str, str]
    argv: list[str]
    main_file: str | None
    authkey: bytes | None

    @classmethod
    def of_this_process(cls, env: Mapping[str, str | None]) -> Self:
        """Return those of the caller, with changes of its environment."""
        process = sys.modules.get("multiprocessing.process")
        return cls(
            sys.path,
            os.getcwd(),  # noqa: PTH109 - a string travels lighter
            changed_environ(env),
            sys.argv,
            getattr(sys.modules.get("__main__"), "__file__", None),
            None if process is None else bytes(process.current_process().authkey),
        )

    def restore(self) -> None:
        """Make them those of this process."""
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environment)
        with contextlib.suppress(OSError):  # it may be gone, which only those who use it need to know
            os.chdir(self.folder)
        sys.argv[:] = self.argv
        if self.main_file is not None:
            sys.modules["__main__"].__file__ = self.main_file
        if self.authkey is not None:
            from multiprocessing import process

            process.current_process().authkey = self.authkey


def nesting_depth() -> int:
    """Return in how many workers, each started by the one before, this code runs."""
    value = os.environ.get(DEPTH_VARIABLE, "")
    return int(value) if value.isdigit() else 0


def changed_environ(env: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment with some variables changed, and without those that are ``None``."""
    changed = {**os.environ, **env}
    return {name: value for name, value in changed.items() if value is not None}


def prepare_process(setup: Setup, send_record: Callable[[logging.LogRecord], None]) -> None:
    """Pin this process to its device and cores, limit its threads, send its log records to the parent."""
    if setup.settings.cpus is not None:
        os.sched_setaffinity(0, setup.settings.cpus[setup.worker])
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(setup.threads)))
    for name, value in setup.settings.env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    os.environ[DEPTH_VARIABLE] = str(nesting_depth() + 1)
    if not setup.device.startswith("cpu"):
        import torch

        torch.accelerator.set_device_index(torch.device(setup.device))
    limit_torch(setup.threads)
    _keep_freed_memory()
    root = logging.getLogger()
    root.handlers[:] = [RecordForwarder(setup.worker, setup.device, send_record)]
    if root.level != setup.settings.log_level:  # to set it looks at every logger there is
        root.setLevel(setup.settings.log_level)
    logging.captureWarnings(capture=True)


def limit_torch(threads: int) -> None:
    """Have torch compute with so many threads, if it has been imported."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def _keep_freed_memory() -> None:
    """Have the C library keep up to 128 MiB of freed memory instead of giving it back.

    Results of one size are made again and again; touching fresh pages takes longer than copying.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return  # somebody has set this as they like it
    if _MALLOPT is not None:
        _MALLOPT(_M_MMAP_THRESHOLD, 32 << 20)
        _MALLOPT(_M_TRIM_THRESHOLD, 128 << 20)
