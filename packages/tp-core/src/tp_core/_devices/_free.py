"""How much more memory this process can get on a device."""

import os
from pathlib import Path

import torch

from tp_core._devices._load import available_memory, free_memory

__all__ = ["free_nbytes"]


def free_nbytes(device: torch.device, *, processes: int = 1) -> int | None:
    """Return how many bytes more this process can get on a device; ``None`` if that is not known.

    Args:
        device: The device.
        processes: How many processes share the host's memory, where the device is the CPU.

    On an accelerator, what torch keeps for tensors to come counts as free. On the CPU it is the least of what
    the host has left, what a control group leaves, and the limits of this process (``ulimit -v``, ``-d``).
    """
    if device.type != "cpu":
        free = free_memory(device)
        if free is None:
            return None
        kept = torch.accelerator.memory_reserved(device) - torch.accelerator.memory_allocated(device)
        return free + max(0, kept)
    shared = [n for n in (available_memory(), _left_in_group()) if n is not None]
    own = [n for n in (_left_to("RLIMIT_AS", "VmSize"), _left_to("RLIMIT_DATA", "VmData")) if n is not None]
    return min([*(n // processes for n in shared), *own], default=None)


def _left_in_group() -> int | None:
    """Return what the control group of a container or a batch system leaves."""
    place = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            most, now = (place / limit).read_text("ascii").strip(), (place / used).read_text("ascii").strip()
        except OSError:
            continue
        if most.isdecimal() and now.isdecimal():
            return max(0, int(most) - int(now))
    return None


def _left_to(limit: str, used: str) -> int | None:
    """Return what a limit of this process leaves of what the kernel counts under ``used``."""
    if os.name != "posix":
        return None
    import resource

    most = resource.getrlimit(getattr(resource, limit))[0]
    status = Path("/proc/self/status")
    if most == resource.RLIM_INFINITY or not status.exists():
        return None
    for line in status.read_text("ascii", errors="replace").splitlines():
        if line.startswith(f"{used}:"):
            return max(0, most - int(line.split()[1]) * 1024)
    return None
