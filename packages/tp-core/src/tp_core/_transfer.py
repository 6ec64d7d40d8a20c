"""The move of nested batches and of modules to a device."""

import inspect
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor, nn

from tp_core._devices import as_device
from tp_core._trees import PerType, containers, tree_leaves, tree_map
from tp_core.device_types import MOVE_METHOD, uses_pinned_memory
from tp_core.errors import ConfigError, TransferError

T = TypeVar("T")

# -- Transfer of nested batches -------------------------------------------------------------------


_Move = Callable[[Any, torch.device, bool], Any]


def recursive_to(obj: T, device: torch.device | str | int, *, non_blocking: bool = False) -> T:
    """Return ``obj`` with everything in it that can be moved on ``device``.

    It moves tensors (a parameter as by ``Parameter.to``: the result is a tensor that autograd connects
    to it), modules (in place, the same object), the containers of `tree_map`, and objects with a
    ``.to`` or ``.cuda`` method: graphs, packed sequences, tokenizers' batches. Other objects, and all
    classes, stay. Types are kept. An object that occurs twice is moved once and occurs twice in the
    result. Where nothing had to move, the same object is returned.

    An object with ``.to`` gets ``.to(device, non_blocking=...)``, or ``.to(device)`` if that is all
    it accepts. One with ``.cuda`` alone gets the method named like the type of the device; if it
    has no ``.cpu``, it stays where it is when the device is the CPU.

    Args:
        obj: A batch: a tensor, or anything around tensors.
        device: The target; an ``int`` is the index of an accelerator.
        non_blocking: Whether not to wait for copies from page-locked memory. Copies to the CPU are always
            waited for.

    Raises:
        DeviceError: ``device`` names no device.
        TransferError: An object's method returned ``None``, or it has none for this device type.
        CycleError: A container contains itself.

    Example:
        >>> batch = {"x": torch.zeros(2), "names": ["a", "b"]}
        >>> recursive_to(batch, "meta")["x"].device
        device(type='meta')
        >>> recursive_to(batch, "cpu") is batch
        True
    """
    try:
        leaf = _leaf(device, non_blocking)
    except TypeError:  # not hashable: as_device has the message for that
        leaf = _leaf(as_device(device), non_blocking)
    result: T = tree_map(leaf, obj, table=_TO_CONTAINERS)
    return result


def to_device(obj: T, device: torch.device) -> T:
    """Return ``obj`` on ``device`` by `recursive_to`; the host waits for copies to the CPU alone."""
    return recursive_to(obj, device, non_blocking=True)


def device_of(obj: Any) -> torch.device:
    """Return the device of the first tensor in ``obj``, or the CPU if there is none."""
    return next((x.device for x in tree_leaves(obj) if isinstance(x, Tensor)), torch.device("cpu"))


@lru_cache(maxsize=64, typed=True)  # typed: True is not an index, though it equals 1
def _leaf(device: torch.device | str | int, non_blocking: bool) -> Callable[[Any], Any]:
    """Return a function that moves one leaf; cached, as a loop needs the same one for every batch.

    Raises:
        ConfigError: ``non_blocking`` is no truth; a text such as "no" would count as true.
    """
    if not isinstance(non_blocking, bool | int):
        msg = f"non_blocking must be True or False, got {non_blocking!r:.80}"
        raise ConfigError(msg)
    target = as_device(device)
    # The host would read a copy to the CPU before it has arrived: torch makes those from an accelerator into
    # page-locked memory, and returns at once.
    non_blocking = non_blocking and target.type != "cpu"

    def move(value: Any) -> Any:
        cls = type(value)
        if cls is Tensor:
            if value.device == target:  # a third of what .to costs
                return value
            return value.to(target, non_blocking=non_blocking)
        mover = _MOVES[cls]
        if mover is None:
            return value
        return mover(value, target, non_blocking)

    return move


def recursive_pin(obj: T) -> T:
    """Return ``obj`` with its CPU tensors in page-locked memory, so that copies overlap with computation.

    It pins tensors on the CPU and objects with a ``.pin_memory()`` method, in the containers of
    `tree_map`; other objects stay. Where there is no accelerator, or one that does not use page-locked
    memory, ``obj`` itself is returned.

    Raises:
        TransferError: An object's ``.pin_memory()`` returned ``None``.
        CycleError: A container contains itself.

    Example:
        >>> batch = recursive_pin([torch.zeros(2), "name"])
    """
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None or not uses_pinned_memory(accelerator.type):
        return obj
    result: T = tree_map(_pin, obj, table=_PIN_CONTAINERS)
    return result


def _pin(value: Any) -> Any:
    if isinstance(value, Tensor):
        if value.device.type != "cpu" or value.is_pinned():
            return value
        return value.pin_memory()
    if not _has_pin_memory(type(value)):
        return value
    return _checked(value.pin_memory(), value, "pin_memory")


# -- styles of methods, by type -------------------------------------------------------------------


class _Style(NamedTuple):
    """The arguments that a method accepts."""

    device: Literal["first", "keyword", "not"]
    non_blocking: bool

    def call(self, method: Callable[..., Any], device: torch.device, *, non_blocking: bool) -> Any:
        options: dict[str, Any] = {"non_blocking": non_blocking} if self.non_blocking else {}
        if self.device == "first":
            return method(device, **options)
        if self.device == "keyword":
            return method(device=device, **options)
        if device.index is None:
            return method(**options)
        with torch.accelerator.device_index(device.index):  # .cuda() goes to the current device
            return method(**options)


@lru_cache(maxsize=4096)
def _style(cls: type, name: str) -> _Style:
    """Read the signature: a TypeError from a call could as well be one from inside the method."""
    method = getattr(cls, name)
    try:
        parameters = list(inspect.signature(method).parameters.values())
    except (TypeError, ValueError):  # written in C: Tensor's own take both, others are unknown
        return _Style("first", non_blocking=issubclass(cls, Tensor))
    kinds = {p.name: p.kind for p in parameters}
    positional = [
        p.name
        for p in parameters
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.name != "non_blocking"
    ]
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    device: Literal["first", "keyword", "not"] = "not"
    if len(positional) > 1 or any(p.kind is p.VAR_POSITIONAL for p in parameters):
        device = "first"
    elif "device" in kinds or takes_any:
        device = "keyword"
    return _Style(device, non_blocking="non_blocking" in kinds or takes_any)


def _has(cls: type, name: str) -> bool:
    # By the type and not the object: a field named "to" is data. Classes are never moved.
    return not issubclass(cls, type) and callable(getattr(cls, name, None))


def _has_pin_memory(cls: type) -> bool:
    return _has(cls, "pin_memory")


def _is_movable(cls: type) -> bool:
    return _has(cls, "to") or _has(cls, MOVE_METHOD)


def _move_of(cls: type) -> _Move | None:
    if not _is_movable(cls):
        return None
    if not _has(cls, "to"):
        return _move_by_name
    style = _style(cls, "to")

    def move(value: Any, device: torch.device, non_blocking: bool) -> Any:
        moved = style.call(value.to, device, non_blocking=non_blocking)
        return _checked(moved, value, "to")

    def move_module(value: Any, device: torch.device, non_blocking: bool) -> Any:
        style.call(value.to, device, non_blocking=non_blocking)
        return value  # modules move in place

    if issubclass(cls, nn.Module):
        return move_module
    return move


def _move_by_name(value: Any, device: torch.device, non_blocking: bool) -> Any:
    cls: type = type(value)
    name = device.type
    if name == "cpu":  # there is one CPU, and .cpu takes no device
        if _has(cls, name):
            return _checked(value.cpu(), value, name)
        return value
    if _has(cls, name):
        moved = _style(cls, name).call(getattr(value, name), device, non_blocking=non_blocking)
        return _checked(moved, value, name)
    msg = (
        f"cannot move a {cls.__qualname__} to {device}: it has .cuda but neither .to nor .{name}; "
        "give the class a .to(device) method that returns the moved object"
    )
    raise TransferError(msg)


def _checked(result: Any, value: Any, name: str) -> Any:
    if result is None:
        cls = type(value).__qualname__
        msg = (
            f"{cls}.{name} returned None; let it return the {cls} that holds the result "
            "(self, if it works in place)"
        )
        raise TransferError(msg)
    return result


_MOVES: PerType[_Move | None] = PerType(_move_of)
_TO_CONTAINERS = containers(stop=_is_movable)
_PIN_CONTAINERS = containers(stop=_has_pin_memory)


def move_module(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to a device in place, and return the result of its ``.to``.

    For some devices, for example of torch's extensions, ``module.to(device)`` makes new parameters. An
    optimizer that was made before would continue with the old ones, and tied weights would be untied. This
    function keeps them the same objects.
    """
    replaces_all = torch.__future__.get_overwrite_module_params_on_conversion()
    is_there = all(p.device == device for p in module.parameters())
    if (is_there and not replaces_all) or not makes_other_parameters(device):
        return module.to(device)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def makes_other_parameters(device: torch.device) -> bool:
    """Return whether ``.to`` makes new parameters, which torch decides by the device."""
    probe = nn.ParameterList([nn.Parameter(torch.empty(0, device="cpu"))])
    before: Tensor = probe[0]
    probe.to(device)
    return probe[0] is not before
