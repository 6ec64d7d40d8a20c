"""Setup of a worker process before the user's code runs: device, threads, logging, environment."""

import contextlib
import logging
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, Self

from tp_core.errors import ConfigError
from tp_core.launching import available_cores

from tp_runner._options import Settings
from tp_runner._workers._item import WorkerIdentity
from tp_runner._workers._pickling import USERS_ERRORS, explain_not_picklable, short_repr


def handle_records(records: Iterable[logging.LogRecord]) -> None:
    """Give a worker's records to the parent's loggers of their names."""
    for record in records:
        logger = logging.getLogger(record.name)
        if logger.isEnabledFor(record.levelno):
            logger.handle(record)


class RecordForwarder(logging.Handler):
    """Handler that sends records to the parent, with the worker and its device."""

    def __init__(self, worker: int, device: str, send_record: Callable[[logging.LogRecord], None]) -> None:
        super().__init__()
        self._worker = worker
        self._device = device
        self._send_record = send_record

    def emit(self, record: logging.LogRecord) -> None:
        """Send ``record``; arguments and exceptions become text, as they may not be picklable."""
        try:
            record.msg, record.args = record.getMessage(), None
            if record.exc_info:
                formatter = self.formatter or logging.Formatter()
                record.exc_text = formatter.formatException(record.exc_info)
                record.exc_info = None
            for name, value in list(vars(record).items()):
                if name not in _RECORD_FIELDS and not _travels(value):  # what the work has added to it
                    setattr(record, name, short_repr(value))
            record.worker = self._worker
            record.device = self._device
            self._send_record(record)
        except Exception:  # noqa: BLE001 - logging's own way: a record never ends the program
            self.handleError(record)


_RECORD_FIELDS = vars(logging.makeLogRecord({})).keys()


def _travels(value: Any) -> bool:
    try:
        pickle.loads(pickle.dumps(value, 5))
    except USERS_ERRORS:
        return False
    return True


DEPTH_VARIABLE = "TP_RUNNER_DEPTH"
WIDTH_VARIABLE = "TP_RUNNER_WIDTH"
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


class Setup(NamedTuple):
    """Everything that a worker needs before its first chunk."""

    program: Any  # the program, its pickle, or its place in shared memory
    device: str
    worker: int
    n_workers: int  # how many there are
    settings: Settings  # how the runner is run
    surroundings: "Surroundings | None" = None  # for a process on another machine

    @property
    def info(self) -> WorkerIdentity:
        return WorkerIdentity(self.worker, self.n_workers, self.device, self.settings.seed)

    @property
    def threads(self) -> int:
        settings = self.settings
        if settings.threads is None and settings.cpus is not None:
            return len(settings.cpus[self.worker])
        return settings.threads or 1

    def pickled(self) -> bytes:
        """Pickle the setup, and in front of it the surroundings that a process needs to unpickle it.

        A fork server is as old as the first runner, and has the directory and environment of that time.
        """
        surroundings = Surroundings.of_this_process(self.settings.env)
        try:
            return pickle.dumps((surroundings, pickle.dumps(self, 5)), 5)
        except USERS_ERRORS as error:  # all else in it is plain, or bytes
            collate = self.settings.batching and self.settings.batching.collate
            msg = f"{explain_not_picklable(collate, 'collate', error)}; it must travel to the workers"
            from tp_runner.errors import NotPicklableError  # as in _pickling

            raise NotPicklableError(msg) from error


class Surroundings(NamedTuple):
    """The state of a process that a worker takes over from its parent."""

    path: list[str]
    folder: str
    environment: dict[str, str]  # the variables
    argv: list[str]  # the arguments of the program
    main_file: str | None  # the file of the main module, if it has one
    authkey: bytes | None  # the key of multiprocessing's connections; ``None`` if it is not used
    umask: int  # the permissions that new files do not get
    decimals: Any  # the context of decimal numbers; ``None`` if it is not used

    @classmethod
    def of_this_process(cls, env: Mapping[str, str | None]) -> Self:
        process = sys.modules.get("multiprocessing.process")
        decimal = sys.modules.get("decimal")
        folder = ""  # the folder may be gone; work that needs it will notice
        with contextlib.suppress(OSError):
            folder = os.getcwd()  # noqa: PTH109 - a string travels lighter
        if process is None:
            authkey = None
        else:
            authkey = bytes(process.current_process().authkey)
        if decimal is None:
            decimal_context = None
        else:
            decimal_context = decimal.getcontext()
        return cls(
            sys.path,
            folder,
            changed_environ(env),
            sys.argv,
            getattr(sys.modules.get("__main__"), "__file__", None),
            authkey,
            _umask(),
            decimal_context,
        )

    @classmethod
    def for_another_machine(cls, env: Mapping[str, str | None]) -> Self:
        """Return what is the same on every machine: no folder, no key, no variable but the time zone's."""
        here = cls.of_this_process(env)
        environment = {name: value for name, value in here.environment.items() if name == "TZ"}
        return here._replace(folder="", environment=environment, main_file=None, authkey=None)

    def restore_elsewhere(self) -> None:
        """Take over, on another machine, what is the same on every one."""
        sys.path += [entry for entry in self.path if entry not in sys.path]  # after what the machine has
        os.environ.update(self.environment)
        sys.argv[:] = self.argv
        self._restore_conventions()

    def restore(self) -> None:
        """Take over everything, on the same machine."""
        sys.path[:] = self.path
        os.environ.clear()
        os.environ.update(self.environment)
        with contextlib.suppress(OSError):  # as above
            os.chdir(self.folder)
        sys.argv[:] = self.argv
        if self.main_file is not None:
            sys.modules["__main__"].__file__ = self.main_file
        if self.authkey is not None:
            from multiprocessing import process

            process.current_process().authkey = self.authkey
        self._restore_conventions()

    def _restore_conventions(self) -> None:
        os.umask(self.umask)
        if self.decimals is not None:
            import decimal

            decimal.setcontext(self.decimals)
        time.tzset()  # the C library keeps the zone of the time when it was first asked


def _umask() -> int:
    """Return the mask of this process, which the system only tells while it sets another one."""
    # Linux writes it down, and other threads notice nothing. Not by pathlib: its import takes longer.
    with contextlib.suppress(OSError, ValueError), open("/proc/self/status") as status:  # noqa: PTH123
        for line in status:
            if line.startswith("Umask:"):
                return int(line.split()[1], 8)
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


# -- Runners that workers start -----------------------------------------------------------------


class _Unpickling(threading.local):
    """A block in which a worker unpickles what it was sent, and imports the modules that this needs."""

    is_entered = False

    def __enter__(self) -> None:
        self.is_entered = True

    def __exit__(self, *_: object) -> None:
        self.is_entered = False


unpickling = _Unpickling()

DEEPEST = 10
"""The deepest nesting of runners within workers; deeper ones are refused."""
MOST_NESTED = 256
"""So many workers may be nested in any case, and on large machines two levels of one worker on each core."""


def nesting_depth() -> int:
    """Return how deep workers are nested here: 0 outside of all workers."""
    return _number_of(DEPTH_VARIABLE, 0)


def nesting_width() -> int:
    """Return how many workers there are on this level of nesting, if all levels above are alike."""
    return _number_of(WIDTH_VARIABLE, 1)


def _number_of(variable: str, default: int) -> int:
    value = os.environ.get(variable, "")
    if value.isdigit():
        return int(value)
    return default


def check_nesting(n_workers: int) -> None:
    """Refuse workers that workers would start without an end, or in a number that no machine has room for."""
    if unpickling.is_entered:
        # The workers of this runner would import the same module, and start others in turn: as many processes
        # as there are workers at first, and on each level again as many for each of them.
        msg = (
            "a module started this runner while a worker imported it, and each of its workers would do the "
            "same; start it in a function, or put it under if __name__ == '__main__'"
        )
        raise ConfigError(msg)
    if nesting_depth() >= DEEPEST:
        msg = (
            f"this runner would be started by a worker, by a worker, ... {DEEPEST} deep; work that starts "
            "runners of itself does that without an end"
        )
        raise ConfigError(msg)
    if nesting_depth():
        n_nested = nesting_width() * n_workers
        most = max(MOST_NESTED, available_cores() ** 2)
        if n_nested > most:
            msg = (
                f"{nesting_width()} workers would start {n_workers} workers each, {n_nested} in all, and "
                f"{most} is the most here; give the runners inside of workers n_workers=1, or fewer levels"
            )
            raise ConfigError(msg)


HASH_SEED = {"PYTHONHASHSEED": str(int.from_bytes(os.urandom(4)))}
"""The hash of text in all interpreters of a program, for items that are grouped or ordered by it.

Another one than this process's, whose seed nobody can read, unless the program's environment has one.
"""


def changed_environ(env: Mapping[str, str | None]) -> dict[str, str]:
    """Return the environment with some variables changed, and without those that are ``None``."""
    changed = {**os.environ, **env}
    return {name: value for name, value in changed.items() if value is not None}


def prepare_process(setup: Setup, send_record: Callable[[logging.LogRecord], None]) -> None:
    """Pin this process to its device and cores, limit its threads, send its log records to the parent."""
    if setup.surroundings is not None:
        setup.surroundings.restore_elsewhere()
        keep_freed_memory()  # a process of this machine does it after its first results
    if setup.settings.cpus is not None:
        os.sched_setaffinity(0, setup.settings.cpus[setup.worker])
    os.environ.update(dict.fromkeys(_THREAD_VARIABLES, str(setup.threads)))
    for name, value in setup.settings.env.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    if "TZ" in setup.settings.env:
        time.tzset()
    os.environ[DEPTH_VARIABLE] = str(nesting_depth() + 1)
    os.environ[WIDTH_VARIABLE] = str(nesting_width() * setup.n_workers)
    make_current(setup.device)
    limit_torch(setup.threads)
    root = logging.getLogger()
    root.handlers[:] = [RecordForwarder(setup.worker, setup.device, send_record)]
    if root.level != setup.settings.log_level:  # setLevel visits every logger there is
        root.setLevel(setup.settings.log_level)
    logging.captureWarnings(capture=True)


def make_current(device: str) -> None:
    """Make an accelerator's device the current one of this thread."""
    if not device.startswith("cpu"):
        import torch

        torch.accelerator.set_device_index(torch.device(device))


def limit_torch(threads: int) -> None:
    """Set the number of torch's threads, if it has been imported."""
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(threads)


def keep_freed_memory() -> None:
    """Make the C library keep up to 128 MiB of freed memory for the next result.

    Results of one size are made again and again; touching fresh pages takes longer than copying.
    """
    if any(name.startswith("MALLOC_") for name in os.environ):
        return  # the user has set malloc by the environment
    import ctypes

    mallopt = getattr(ctypes.pythonapi, "mallopt", None)  # opening the C library takes longer
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 128 << 20)
