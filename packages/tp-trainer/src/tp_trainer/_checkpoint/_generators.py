"""The random generators of one rank, as plain values."""

import base64
import random
import sys
from collections.abc import Mapping
from typing import Any

import torch
from tp_core import available_devices
from tp_core.internal import device_rng_state, seed_everything, seed_of, set_device_rng_state


def capture(devices: tuple[torch.device, ...]) -> dict[str, Any]:
    """Return the state of Python's, numpy's (if it is loaded), torch's and the devices' generators."""
    version, words, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(words), gauss],
        "torch": _as_text(torch.get_rng_state()),
        "devices": {},
    }
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, position, has_gauss, cached = numpy.random.get_state()
        state["numpy"] = [kind, keys.tolist(), position, has_gauss, cached]
    for device in devices:
        if device.type != "cpu" and device in available_devices():  # a planned job's devices may not exist
            state["devices"][str(device)] = _as_text(device_rng_state(device))
    return state


def restore(state: Mapping[str, Any]) -> None:
    """Restore the states of :func:`capture`; devices that do not exist here are skipped."""
    version, words, gauss = state["python"]
    random.setstate((version, tuple(words), gauss))
    torch.set_rng_state(_as_tensor(state["torch"]))
    numpy = sys.modules.get("numpy")
    if numpy is not None and "numpy" in state:
        kind, keys, position, has_gauss, cached = state["numpy"]
        numpy.random.set_state((kind, numpy.array(keys, dtype=numpy.uint32), position, has_gauss, cached))
    kept = state["devices"] if "devices" in state else state["cuda"]  # the key in older files
    for device in available_devices() if kept else ():
        if str(device) in kept:
            set_device_rng_state(device, _as_tensor(kept[str(device)]))


def reseed(*key: int) -> None:
    """Seed all generators from a key of numbers; the same key gives the same states."""
    seed_everything(seed_of(key))


def _as_text(tensor: torch.Tensor) -> str:
    return base64.b64encode(bytes(tensor.tolist())).decode()


def _as_tensor(text: str) -> torch.Tensor:
    return torch.tensor(list(base64.b64decode(text)), dtype=torch.uint8)
