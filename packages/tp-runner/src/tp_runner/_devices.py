"""Resolve the devices and cores of workers; CPU workers need no torch."""

import itertools
import os
import sys
import warnings
from collections.abc import Collection, Sequence
from typing import Any

from tp_core.errors import ConfigError, DeviceError
from tp_core.internal import available_cores


def resolve(devices: Any, *, n_workers: int | None = None, elsewhere: bool = False) -> tuple[str, ...]:
    """Return one device for each worker.

    Args:
        devices: A number of CPU workers; ``None`` for one on each core; a device or a sequence of
            them; ``"auto"`` for whatever accelerators there are.
        n_workers: A number of CPU workers, in place of ``devices``.
        elsewhere: Whether the workers are on other machines, with devices that are not visible here.

    Raises:
        DeviceError: No device is named, or one does not exist here.
    """
    if n_workers is not None:
        if devices is not None:
            msg = (
                f"n_workers={n_workers!r} is a number of CPU workers and devices={devices!r} names "
                "devices; give one of them"
            )
            raise DeviceError(msg)
        return ("cpu",) * _check_count("n_workers", n_workers)
    if devices is None:
        return ("cpu",) * available_cores()
    if isinstance(devices, int) and not isinstance(devices, bool):
        return ("cpu",) * _check_count("devices as a number of CPU workers", devices)
    if isinstance(devices, str) and devices.isdigit():
        msg = (
            f"devices={devices!r} could be CPU workers or accelerators; give n_workers={devices} for "
            f"CPU workers, or the devices themselves, such as ['cuda:0', 'cuda:1']"
        )
        raise DeviceError(msg)
    if devices == "cpu":
        return ("cpu",)
    if isinstance(devices, Sequence) and not isinstance(devices, str):
        if not devices:
            msg = "devices is an empty sequence; give at least one, such as devices=['cpu']"
            raise DeviceError(msg)
        if all(device == "cpu" for device in devices if isinstance(device, str)) and all(
            isinstance(device, str) for device in devices
        ):
            return tuple(devices)
        if elsewhere:
            import torch

            return tuple(str(torch.device(device)) for device in devices)
    from tp_core import resolve_devices

    return tuple(str(device) for device in resolve_devices(devices))


def _check_count(name: str, count: Any) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        msg = f"{name} must be a whole number of at least 1, got {count!r}"
        raise DeviceError(msg)
    return count


def cores_of_workers(cpus: Any, n_workers: int) -> tuple[tuple[int, ...], ...]:
    """Return the cores that each worker is pinned to.

    Args:
        cpus: A number or a set of numbers for each worker; ``"split"`` for an even share of those that this
            process may use: several each, or one that several workers share.
        n_workers: How many workers there are.

    Raises:
        ConfigError: This is not such a value, the system pins nobody, or this process may not use a core.
    """
    if not hasattr(os, "sched_setaffinity"):
        msg = f"cpus={cpus!r} pins workers to cores, which {sys.platform} has no call for; leave it out"
        raise ConfigError(msg)
    there = sorted(os.sched_getaffinity(0))
    if cpus == "split":
        first = [worker * len(there) // n_workers for worker in range(n_workers + 1)]
        return tuple(tuple(there[start : max(end, start + 1)]) for start, end in itertools.pairwise(first))
    if not isinstance(cpus, Sequence) or isinstance(cpus, str | bytes):
        msg = f"cpus must be 'split', or cores for each worker such as [{{0, 1}}, {{2, 3}}], got {cpus!r}"
        raise ConfigError(msg)
    if len(cpus) != n_workers:
        msg = f"cpus={cpus!r} has cores for {len(cpus)} workers, and there are {n_workers}; give each its own"
        raise ConfigError(msg)
    return tuple(_check_cores(worker, own, there) for worker, own in enumerate(cpus))


def _check_cores(worker: int, own: Any, there: list[int]) -> tuple[int, ...]:
    cores = tuple(own) if isinstance(own, Collection) and not isinstance(own, str | bytes) else (own,)
    if not cores or not all(isinstance(core, int) and not isinstance(core, bool) for core in cores):
        msg = f"cpus must have at least one core, by its number, for worker {worker}, got {own!r}"
        raise ConfigError(msg)
    for core in cores:
        if core not in there:
            known = ", ".join(map(str, there))
            msg = f"cpus has core {core} for worker {worker}, and this process may use {known} alone"
            raise ConfigError(msg)
    return tuple(sorted(set(cores)))


_ON_WINDOWS = (
    "tp-runner's worker processes need Linux or macOS; on Windows give engine='thread', engine='inline' or "
    "engine='ray', or work in WSL"
)


def warn_of_platform() -> None:
    """Warn at import that this platform has no worker processes."""
    if sys.platform == "win32":
        warnings.warn(_ON_WINDOWS, RuntimeWarning, stacklevel=3)


def require_processes() -> None:
    """Refuse worker processes where there can be none.

    Raises:
        ConfigError: This is Windows.
    """
    if sys.platform == "win32":
        raise ConfigError(_ON_WINDOWS)
