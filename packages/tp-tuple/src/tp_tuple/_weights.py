"""The share of each device: as given, by free memory, or by measured speed."""

import math
import os
from collections import Counter
from collections.abc import Sequence
from typing import Any, Literal

import torch
from tp_core import resolve_devices
from tp_core.errors import ConfigError
from tp_core.internal import free_nbytes

from tp_tuple._speeds import Speeds

__all__ = ["Weights", "check_weights", "free_memory", "resolve_weights"]

Weights = Sequence[float] | Literal["memory", "auto"] | Speeds | None


def resolve_weights(
    weights: Weights, count: int, devices: Sequence[Any] | None
) -> Sequence[float] | Speeds | None:
    """Return the weights as numbers, or where they are measured; ``None`` for even shares.

    Args:
        weights: What the user gave.
        count: The number of devices.
        devices: The devices, if the user named them.

    Raises:
        ConfigError: The weights are not of a known kind, or do not match the number of devices; or a device
            does not tell how much of its memory is free.
    """
    if weights is None:
        return None
    if isinstance(weights, Speeds):
        if weights.parts != count:
            msg = f"the speeds are those of {weights.parts} devices, and there are {count}"
            raise ConfigError(msg)
        return weights
    if isinstance(weights, str):
        if weights == "auto":
            return Speeds(count)
        if weights == "memory":
            return free_memory(resolve_devices(count if devices is None else list(devices)))
        msg = f"weights must be numbers, 'memory', 'auto' or a Speeds, got {weights!r}"
        raise ConfigError(msg)
    return check_weights(weights, count)


def check_weights(weights: Sequence[float], parts: int) -> tuple[float, ...]:
    """Return the weights as floats.

    Raises:
        ConfigError: The number of weights is not that of parts, or one is not a positive number.
    """
    checked = tuple(float(w) for w in weights)
    if len(checked) != parts:
        msg = f"{parts} parts need {parts} weights, got {len(checked)}: {list(weights)!r}"
        raise ConfigError(msg)
    if not all(math.isfinite(w) and w > 0 for w in checked):
        msg = f"weights must be positive numbers, got {list(weights)!r}"
        raise ConfigError(msg)
    return checked


def free_memory(devices: Sequence[torch.device]) -> list[float]:
    """Return the bytes that are free on each device; a device that occurs twice gives half each."""
    times = Counter(devices)
    return [max(1.0, _free(d) / times[d]) for d in devices]


def _free(device: torch.device) -> float:
    if device.type == "cpu":
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    free = free_nbytes(device)
    if free is None:
        msg = f"weights='memory' asks how much memory is free on {device}, which does not tell; give numbers"
        raise ConfigError(msg)
    return float(free)
