"""Which worker this code runs in, and what its random numbers are."""

import contextlib
import importlib
import os
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tp_core.internal import kept_generators, seed_everything, seed_of

if TYPE_CHECKING:
    import torch

__all__ = [
    "WorkerInfo",
    "acting_as",
    "become",
    "import_generators",
    "keep_generators",
    "seed_generators",
    "worker",
]


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """One worker among those of its runner.

    Attributes:
        number: Its number, from 0.
        count: How many workers there are.
        device: Its device, as a string such as "cuda:0" or "cpu".
        seed: What the runner was given as ``seed``; ``None`` without one.
    """

    number: int
    count: int
    device: str
    seed: int | None


_of_process: WorkerInfo | None = None
_of_thread = threading.local()


def worker() -> WorkerInfo | None:
    """Return which worker the caller runs in; ``None`` outside of all workers.

    Example:
        >>> def shard(items):
        ...     me = tp_runner.worker()
        ...     return items[me.number :: me.count]
    """
    return getattr(_of_thread, "info", None) or _of_process


def become(info: WorkerInfo) -> None:
    """Make this process a worker, and give it random numbers of its own.

    With a seed every worker begins with the same ones, so that a model that each of them makes is the
    same; its items are seeded one by one. Without one, no two workers, of any run, have the same.
    """
    global _of_process  # noqa: PLW0603 - it is about the process
    _of_process = _of_thread.info = info
    if info.seed is None:
        # What is loaded later takes its own from the system.
        seed_everything(int.from_bytes(os.urandom(8)) >> 1, load=False)
    else:
        import_generators()
        seed_generators(info.seed)


@contextlib.contextmanager
def acting_as(info: WorkerInfo) -> Iterator[None]:
    """Act as a worker in this thread for a while."""
    before = getattr(_of_thread, "info", None)
    _of_thread.info = info
    try:
        yield
    finally:
        _of_thread.info = before


def import_generators() -> None:
    """Import those whose seeding is asked for: what is imported later would begin where it likes."""
    for name in ("numpy", "torch"):
        with contextlib.suppress(ImportError):
            importlib.import_module(name)


def seed_generators(*key: int) -> None:
    """Seed Python's generator by some numbers, and numpy's and torch's where they are loaded."""
    seed_everything(seed_of(key))


@contextlib.contextmanager
def keep_generators() -> Iterator[None]:
    """Leave the generators as they were: the caller's own, where its thread does the work."""
    with kept_generators(_devices_in_use()):
        yield


def _devices_in_use() -> "Sequence[torch.device]":
    """Return the accelerators, if this process uses them: none is to be started for its generator."""
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ()
    is_initialized = getattr(torch.get_device_module(accelerator), "is_initialized", None)
    if is_initialized is not None and not is_initialized():
        return ()
    return [torch.device(accelerator.type, i) for i in range(torch.accelerator.device_count())]
