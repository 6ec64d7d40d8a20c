"""Which devices the workers are on; plain CPU workers need no torch."""

from collections.abc import Sequence
from typing import Any

from tp_core.errors import DeviceError
from tp_core.internal import available_cores

__all__ = ["resolve"]


def resolve(devices: Any, *, n_workers: int | None = None, elsewhere: bool = False) -> tuple[str, ...]:
    """Return one device for each worker.

    Args:
        devices: A number of CPU workers; ``None`` for one on each core; a device or a sequence of
            them; ``"auto"`` for whatever accelerators there are.
        n_workers: A number of CPU workers, in place of ``devices``.
        elsewhere: Whether the workers are on other machines, whose devices nobody can see here.

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
        return ("cpu",) * _checked("n_workers", n_workers)
    if devices is None:
        return ("cpu",) * available_cores()
    if isinstance(devices, int) and not isinstance(devices, bool):
        return ("cpu",) * _checked("devices as a number of CPU workers", devices)
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


def _checked(name: str, count: Any) -> int:
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        msg = f"{name} must be a whole number of at least 1, got {count!r}"
        raise DeviceError(msg)
    return count
