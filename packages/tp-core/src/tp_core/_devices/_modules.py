"""Move a module to a device, and keep its parameters the objects that they are."""

import torch
from torch import Tensor, nn

__all__ = ["move_module"]


def move_module(module: nn.Module, device: torch.device) -> nn.Module:
    """Move a module to a device in place, and return what its ``.to`` returns.

    Where a device's tensors are of another kind than the CPU's, as those of a device that an extension of
    torch brings are, ``module.to(device)`` makes other parameters: an optimizer that was made before would
    go on with the old ones, and weights that are tied would come apart. Here they stay the same objects.

    Args:
        module: The module.
        device: Where to.
    """
    replaces_all = torch.__future__.get_overwrite_module_params_on_conversion()
    is_there = all(p.device == device for p in module.parameters())
    if (is_there and not replaces_all) or not _makes_other_parameters(device):
        return module.to(device)
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        return module.to(device)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def _makes_other_parameters(device: torch.device) -> bool:
    """Return whether ``.to`` puts other parameters into a module, which torch decides by the device."""
    probe = nn.ParameterList([nn.Parameter(torch.empty(0, device="cpu"))])
    before: Tensor = probe[0]
    probe.to(device)
    return probe[0] is not before
