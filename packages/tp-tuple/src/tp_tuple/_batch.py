"""Batch objects that move with all their attributes, and functions that move nested values."""

import copy
from typing import Any, Self, TypeVar

import torch
from tp_core import as_device, containers, recursive_pin, recursive_to, tree_map
from tp_core.device_types import MOVE_METHOD
from tp_core.errors import DeviceError, TransferError

T = TypeVar("T")
Device = torch.device | str | int


def recursive_cuda(val: T, device: Device | None = None, *, non_blocking: bool = False) -> T:
    """Return ``val`` on ``device``, recursing into lists, tuples, dicts and dataclasses.

    ``device`` may be of any type. Objects move through their ``.to``; one with ``.cuda`` alone gets
    ``.cuda(device)``, whatever the device; what has neither is returned as it is.

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
    target = as_device(_device_or_current(device))
    # As by `recursive_to`: the host waits for copies to the CPU.
    if non_blocking and target.type != "cpu":
        options = {"non_blocking": True}
    else:
        options = {}

    def move(value: Any) -> Any:
        if not _has_only_cuda(type(value)) or target.type == MOVE_METHOD:
            return recursive_to(value, target, non_blocking=non_blocking)
        moved = value.cuda(target, **options)
        if moved is None:
            name = type(value).__qualname__
            msg = f"{name}.cuda returned None; let it return the {name} that holds the result"
            raise TransferError(msg)
        return moved

    result: T = tree_map(move, val, table=_CONTAINERS)
    return result


def _has_only_cuda(cls: type) -> bool:
    return _has_method(cls, MOVE_METHOD) and not _has_method(cls, "to")


def _moves_itself(cls: type) -> bool:
    return _has_method(cls, MOVE_METHOD) or _has_method(cls, "to")


def _has_method(cls: type, name: str) -> bool:
    return not issubclass(cls, type) and callable(getattr(cls, name, None))


_CONTAINERS = containers(stop=_moves_itself)


def cuda_attrs(obj: T, device: Device | None = None, *, non_blocking: bool = False) -> T:
    """Move every attribute of ``obj`` by `recursive_cuda`, and return ``obj``.

    A generic ``.cuda`` for custom classes. The object itself is changed.

    Args:
        obj: An object with attributes, in its dictionary or in slots; a frozen dataclass, too.
        device: Where to; the current accelerator by default.
        non_blocking: Do not wait for copies from page-locked memory.

    Raises:
        TransferError: The object has no attributes, or a value's own method returned ``None``.
        DeviceError: No device was named and there is no accelerator.
    """
    moved = recursive_cuda(_attributes(obj), device, non_blocking=non_blocking)
    return _set_attributes(obj, moved)


def _attributes(obj: Any) -> dict[str, Any]:
    # Python mangles slots with two leading underscores: `__x` of class A is the attribute `_A__x`.
    slots = []
    for cls in type(obj).__mro__:
        for slot in _slots_of(cls):
            is_mangled = slot.startswith("__") and not slot.endswith("__")
            if is_mangled:
                attribute = f"_{cls.__name__.lstrip('_')}{slot}"
            else:
                attribute = slot
            slots.append(attribute)
    values = {slot: getattr(obj, slot) for slot in slots if hasattr(obj, slot)}
    if not slots and not hasattr(obj, "__dict__"):
        msg = f"cannot move the attributes of a {type(obj).__qualname__}: it has none; use recursive_cuda"
        raise TransferError(msg)
    return values | getattr(obj, "__dict__", {})


def _slots_of(cls: type) -> list[str]:
    slots = cls.__dict__.get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in {"__dict__", "__weakref__"}]


def _set_attributes(obj: T, values: dict[str, Any]) -> T:
    for name, value in values.items():
        object.__setattr__(obj, name, value)  # frozen dataclasses refuse plain assignment
    return obj


cuda_fields = cuda_attrs
"""Another name of `cuda_attrs`."""


class Batch:
    """Base class of batch objects: all attributes move together.

    ``.cuda()`` moves the object itself, as `cuda_attrs` does; ``.to()`` and ``.pin_memory()``
    return another one, as they do for tensors.

    Example:
        >>> class Graphs(Batch):
        ...     def __init__(self, x):
        ...         self.x = x
        >>> Graphs(torch.zeros(2)).to("meta").x.device
        device(type='meta')
    """

    def cuda(self, device: Device | None = None, *, non_blocking: bool = False) -> Self:
        """Move all attributes in place and return the object; raise the errors of `cuda_attrs`."""
        return cuda_attrs(self, device, non_blocking=non_blocking)

    def to(self, device: Device, *, non_blocking: bool = False) -> Self:
        """Return a copy with its attributes on ``device``; raise the errors of `cuda_attrs`."""
        return cuda_attrs(copy.copy(self), device, non_blocking=non_blocking)

    def pin_memory(self) -> Self:
        """Return a copy with its attributes in page-locked memory.

        Raises:
            TransferError: The object has no attributes.
        """
        return _set_attributes(copy.copy(self), recursive_pin(_attributes(self)))


def _device_or_current(device: Device | None) -> Device:
    if device is not None:
        return device
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        msg = "no device was named, and there is no accelerator here; name one: recursive_cuda(val, 'cpu')"
        raise DeviceError(msg)
    return torch.device(accelerator.type, torch.accelerator.current_device_index())
