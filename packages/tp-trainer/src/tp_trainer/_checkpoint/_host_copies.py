"""Copies of a state on the host, which are written while the training goes on."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from tp_core.device_types import uses_pinned_memory
from tp_core.tensors import TensorSlice

_ALIGNMENT = 64  # bytes, of each tensor in pinned memory: torch's own on the host


class HostCopies:
    """Copies of tensors, in the same buffers each time: new pages cost more than the copy."""

    def __init__(self) -> None:
        self._copies: dict[tuple[Any, ...], Tensor] = {}

    def take(self, tensors: Mapping[str, Tensor | TensorSlice]) -> dict[str, Tensor | TensorSlice]:
        """Copy tensors to the host, and return the copies; they are valid until the next call."""
        parts: dict[tuple[Any, ...], Tensor] = {}
        for name, value in tensors.items():
            if isinstance(value, TensorSlice):
                parts |= {(name, *start): part for start, part in value.parts}
            else:
                parts[name,] = value
        self._make_room(parts)
        devices = set()
        for key, part in parts.items():
            old = self._copies.get(key)
            if old is None or not _has_room(old, part):
                self._copies[key] = part.to("cpu", copy=True)
            elif part.device.type != "cpu" and old.is_pinned():
                old.copy_(part, non_blocking=True)
                devices.add(part.device)
            else:
                old.copy_(part)
        # Once for all copies. They come after the work of the steps before, and nobody reads them yet.
        for device in devices:
            torch.accelerator.current_stream(device).synchronize()
        copies: dict[str, Tensor | TensorSlice] = {}
        for name, value in tensors.items():
            if isinstance(value, TensorSlice):
                own = [(start, self._copies[name, *start]) for start, _ in value.parts]
                copies[name] = TensorSlice(value.shape, own)
            else:
                copies[name] = self._copies[name,]
        return copies

    def _make_room(self, parts: Mapping[tuple[Any, ...], Tensor]) -> None:
        """Make buffers for tensors of devices that have none that fits, in one piece of pinned memory."""
        missing = {}
        for key, part in parts.items():
            old = self._copies.get(key)
            is_plain = type(part) in (Tensor, Parameter) and part.layout is torch.strided
            is_away = part.nbytes > 0 and uses_pinned_memory(part.device.type)
            if is_plain and is_away and (old is None or not _has_room(old, part)):
                missing[key] = part
        storage = _pinned_bytes(sum(_rounded(part) for part in missing.values()))
        if storage is None:
            return
        begin = 0
        for key, part in missing.items():
            # A storage of its own for each: writers of files take a part of one for a view, and copy it.
            own = storage[begin : begin + part.nbytes]
            stride = torch.empty_like(part, device="meta").stride()
            self._copies[key] = torch.empty(0, dtype=part.dtype).set_(own, 0, part.shape, stride)
            begin += _rounded(part)


def _has_room(buffer: Tensor, tensor: Tensor) -> bool:
    return buffer.shape == tensor.shape and buffer.dtype == tensor.dtype


def _rounded(tensor: Tensor) -> int:
    return -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT


def _pinned_bytes(nbytes: int) -> torch.UntypedStorage | None:
    """Return page-locked memory, which a device copies to without help of the host; None if there is none."""
    if not nbytes:
        return None
    try:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True).untyped_storage()
    except RuntimeError:  # the system limits it, or has no more: the copies wait one by one
        return None
