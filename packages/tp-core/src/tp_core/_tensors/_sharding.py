"""Whether a tensor is one rank's shard of a larger one."""

from typing import TYPE_CHECKING, TypeGuard

import torch

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["SHARDED_ATTRIBUTE", "is_dtensor", "is_sharded"]

SHARDED_ATTRIBUTE = "tp_sharded"
"""A parameter with this attribute set to true holds one shard of a larger one."""


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a DTensor; without importing them, which takes a while."""
    return hasattr(tensor, "device_mesh")


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is one rank's shard: a DTensor, or marked with ``tp_sharded``."""
    return bool(getattr(parameter, SHARDED_ATTRIBUTE, False)) or is_dtensor(parameter)
