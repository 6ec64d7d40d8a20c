"""Moving nested values and objects of one's own."""

import copy
from typing import Any, Self, TypeVar

import torch
from tp_core import recursive_pin, recursive_to
from tp_core.errors import DeviceError

__all__ = ["Batch", "cuda_attrs", "cuda_fields", "recursive_cuda"]

T = TypeVar("T")
Device = torch.device | str | int


def recursive_cuda(val: T, device: Device | None = None, *, non_blocking: bool = False) -> T:
    """Return ``val`` on ``device``, recursing into lists, tuples, dicts and dataclasses.

    Any device will do, not CUDA's alone. Objects move through their ``.to`` or ``.cuda``; what has
    neither is returned as it is.

    Args:
        val: Anything.
        device: Where to; the current accelerator by default.
        non_blocking: Do not wait for copies from page-locked memory.

    Raises:
        DeviceError: No device was named and there is no accelerator.
        TransferError: An object's own method returned ``None``.

    Example:
        >>> recursive_cuda({"x": [torch.zeros(2), "name"]}, "cpu")["x"][1]
        'name'
    """
    return recursive_to(val, _current(device), non_blocking=non_blocking)


def cuda_attrs(obj: T, device: Device | None = None, *, non_blocking: bool = False) -> T:
    """Move every attribute of ``obj`` by `recursive_cuda`, and return ``obj``.

    A generic ``.cuda`` for classes of one's own. The object itself is changed.
    """
    target = _current(device)
    moved: dict[str, Any] = recursive_to(dict(vars(obj)), target, non_blocking=non_blocking)
    for name, value in moved.items():
        object.__setattr__(obj, name, value)  # frozen dataclasses refuse plain assignment
    return obj


cuda_fields = cuda_attrs
"""Another name of `cuda_attrs`."""


class Batch:
    """A base for batch objects: whatever attributes it has, they move together.

    ``.cuda()`` moves the object itself, as `cuda_attrs` does; ``.to()`` and ``.pin_memory()``
    return another one, as those of tensors do.

    Example:
        >>> class Graphs(Batch):
        ...     def __init__(self, x):
        ...         self.x = x
        >>> Graphs(torch.zeros(2)).to("meta").x.device
        device(type='meta')
    """

    def cuda(self, device: Device | None = None, *, non_blocking: bool = False) -> Self:
        """Move all attributes in place and return the object."""
        return cuda_attrs(self, device, non_blocking=non_blocking)

    def to(self, device: Device, *, non_blocking: bool = False) -> Self:
        """Return a copy whose attributes are on ``device``."""
        return cuda_attrs(copy.copy(self), device, non_blocking=non_blocking)

    def pin_memory(self) -> Self:
        """Return a copy whose attributes are in page-locked memory."""
        pinned = copy.copy(self)
        vars(pinned).update(recursive_pin(dict(vars(self))))
        return pinned


def _current(device: Device | None) -> Device:
    if device is not None:
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        msg = "no device was named, and there is no accelerator here; name one: recursive_cuda(val, 'cpu')"
        raise DeviceError(msg)
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
