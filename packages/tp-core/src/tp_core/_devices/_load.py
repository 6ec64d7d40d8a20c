"""How busy the devices are."""

import importlib.util
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from tp_core.errors import DeviceError

__all__ = [
    "DeviceLoad",
    "available_memory",
    "device_loads",
    "free_memory",
    "least_busy",
    "require_utilization",
]

_BUCKETS = 10
"""Utilization is a sample of a fraction of a second: smaller differences mean nothing."""


@dataclass(frozen=True, slots=True)
class DeviceLoad:
    """How busy one device is; what the system does not tell is ``None``.

    Attributes:
        device: The device.
        name: What its maker calls it.
        free_bytes: Its free memory, in bytes.
        total_bytes: All of its memory, in bytes.
        utilization: The fraction of the last moment in which it worked, 0 to 1; for the CPU, the
            load average of the last minute over its cores.
    """

    device: torch.device
    name: str
    free_bytes: int | None
    total_bytes: int | None
    utilization: float | None


def device_loads() -> tuple[DeviceLoad, ...]:
    """Return the load of every accelerator that this process sees, or of the CPU if there is none.

    Utilization of NVIDIA devices comes from NVML, through torch, and needs ``tp-core[nvml]``;
    without that it is ``None``, and asking for the free memory opens a context on each device.

    Example:
        >>> len(device_loads()) >= 1
        True
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return (_cpu_load(),)
    count = torch.accelerator.device_count()
    return tuple(_accelerator_load(torch.device(accelerator.type, i)) for i in range(count))


def least_busy(loads: Sequence[DeviceLoad], count: int) -> tuple[DeviceLoad, ...]:
    """Return the ``count`` least busy of ``loads``, the best first.

    Lower utilization wins, in steps of ten percent; then more free memory; then the lower index.
    What is unknown counts as worst.

    Raises:
        DeviceError: There are fewer than ``count`` devices.
    """
    if count > len(loads):
        names = ", ".join(str(load.device) for load in loads) or "none"
        msg = f"asked for the {count} least busy of {len(loads)} devices ({names}); ask for less"
        raise DeviceError(msg)

    def rank(load: DeviceLoad) -> tuple[int, int, int]:
        used = load.utilization
        bucket = _BUCKETS + 1 if used is None else int(used * _BUCKETS)
        return (bucket, -(load.free_bytes or 0), load.device.index or 0)

    return tuple(sorted(loads, key=rank)[:count])


def require_utilization(loads: Sequence[DeviceLoad]) -> None:
    """Make sure that the load of every device is known.

    Where the driver itself does not tell utilization, free memory alone may decide.

    Raises:
        DeviceError: The utilization of a device is unknown, because a package is missing.
    """
    unknown = [load for load in loads if load.utilization is None and load.device.type == "cuda"]
    if unknown and not torch.version.hip and importlib.util.find_spec("pynvml") is None:
        msg = (
            f"how busy {unknown[0].device} ({unknown[0].name}) is not known without NVML; run "
            "pip install 'tp-core[nvml]', or name the devices, as in devices='cuda:0'"
        )
        raise DeviceError(msg)


def _accelerator_load(device: torch.device) -> DeviceLoad:
    module = torch.get_device_module(device)
    properties = _ask(module, "get_device_properties", device)  # Apple's module has no such function
    total: int | None = getattr(properties, "total_memory", None)
    percent = _ask(module, "utilization", device)
    used = _ask(module, "device_memory_used", device)
    if used is not None and total is not None:
        free: int | None = max(0, total - int(used))
    else:
        free = free_memory(device)
    return DeviceLoad(
        device=device,
        name=str(getattr(properties, "name", device.type)),
        free_bytes=free,
        total_bytes=total,
        utilization=None if percent is None else percent / 100,
    )


def _ask(module: Any, name: str, device: torch.device) -> Any:
    """Call a function of a device's module, if it is there and the vendor's library that it may need."""
    function: Callable[[torch.device], Any] | None = getattr(module, name, None)
    if function is None:
        return None
    try:
        return function(device)
    except _management_errors():
        return None


def _management_errors() -> tuple[type[Exception], ...]:
    """Return what torch raises for a missing library, and the library for a missing feature."""
    errors: list[type[Exception]] = [ImportError, RuntimeError]
    for library, name in (("pynvml", "NVMLError"), ("amdsmi", "AmdSmiException")):
        if importlib.util.find_spec(library) is not None:
            errors.append(getattr(import_module(library), name))
    return tuple(errors)


def free_memory(device: torch.device) -> int | None:
    """Return how many bytes are free on an accelerator, if it tells."""
    try:
        return torch.accelerator.get_memory_info(device)[0]
    except (RuntimeError, NotImplementedError):
        return None


def _cpu_load() -> DeviceLoad:
    total = _pages("SC_PHYS_PAGES")
    cores = os.cpu_count() or 1
    busy = min(1.0, os.getloadavg()[0] / cores) if hasattr(os, "getloadavg") else None
    return DeviceLoad(
        device=torch.device("cpu"),
        name=platform.processor() or platform.machine() or "cpu",
        free_bytes=available_memory(),
        total_bytes=total,
        utilization=busy,
    )


def available_memory() -> int | None:
    """Return what programs can still get: more than what is unused, as caches give way."""
    meminfo = Path("/proc/meminfo")
    if meminfo.exists():
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return _pages("SC_AVPHYS_PAGES")


def _pages(name: str) -> int | None:
    if name not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf(name) * os.sysconf("SC_PAGE_SIZE")
