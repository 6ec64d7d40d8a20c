"""The states of random number generators, on any device."""

import torch
from torch import Tensor

__all__ = ["get_state", "set_state"]


def get_state(device: torch.device, generator: torch.Generator | None) -> Tensor:
    """Return the state of a device's generator, or of the given one."""
    if generator is not None:
        return generator.get_state()
    return (
        torch.get_rng_state()
        if device.type == "cpu"
        else torch.get_device_module(device).get_rng_state(device)
    )


def set_state(state: Tensor, device: torch.device, generator: torch.Generator | None) -> None:
    """Set the state of a device's generator, or of the given one."""
    if generator is not None:
        generator.set_state(state)
    elif device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)
