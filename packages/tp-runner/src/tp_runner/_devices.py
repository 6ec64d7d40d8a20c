"""Which devices the workers are on; plain CPU workers need no torch."""

import os
from collections.abc import Sequence
from typing import Any

from tp_core.errors import DeviceError

__all__ = ["resolve"]


def resolve(devices: Any, *, elsewhere: bool = False) -> tuple[str, ...]:
    """Return one device for each worker.

    Args:
        devices: A number of CPU workers; ``None`` for one on each core; a device or a sequence of
            them; ``"auto"`` for whatever accelerators there are.
        elsewhere: Whether the workers are on other machines, whose devices nobody can see here.

    Raises:
        DeviceError: There are none, or they do not exist here.
    """
    if devices is None:
        return ("cpu",) * _cores()
    if isinstance(devices, int) and not isinstance(devices, bool):
        if devices < 1:
            msg = f"devices as a number of CPU workers must be at least 1, got {devices}"
            raise DeviceError(msg)
        return ("cpu",) * devices
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


def _cores() -> int:
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on every system
        return os.cpu_count() or 1
