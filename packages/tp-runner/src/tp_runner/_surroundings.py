"""What is set up in a worker process before the user's code runs: device, threads, logging."""

import ctypes
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

__all__ = ["limit_torch", "prepare", "share_of_cores"]

_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h


def share_of_cores(n_workers: int) -> int:
    """Return how many threads each of ``n_workers`` may compute with: its share of the cores."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        cores = os.cpu_count() or 1
    return max(1, cores // n_workers)


def prepare(setup: Any, send_record: Callable[[logging.LogRecord], None]) -> None:
    """Pin this process to its device, limit its threads, send its log records to the parent."""
    for variable in _THREAD_VARIABLES:
        os.environ[variable] = str(setup.threads)
    if setup.device.startswith("cuda"):
        import torch

        torch.cuda.set_device(setup.device)
    limit_torch(setup.threads)
    _keep_freed_memory()
    root = logging.getLogger()
    root.handlers[:] = [_Forwarder(setup.worker, setup.device, send_record)]
    root.setLevel(setup.log_level)
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
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, 32 << 20)
        mallopt(_M_TRIM_THRESHOLD, 128 << 20)


class _Forwarder(logging.Handler):
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
