"""How much memory is free on each device."""

import os
from collections import Counter
from collections.abc import Sequence

import torch

__all__ = ["free_memory"]


def free_memory(devices: Sequence[torch.device]) -> list[float]:
    """Return the bytes that are free on each device; a device that occurs twice gives half each."""
    times = Counter(devices)
    return [max(1.0, _free(d) / times[d]) for d in devices]


def _free(device: torch.device) -> float:
    if device.type == "cpu":
        return float(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    module = getattr(torch, device.type)
    free, _total = module.mem_get_info(device)
    return float(free)
