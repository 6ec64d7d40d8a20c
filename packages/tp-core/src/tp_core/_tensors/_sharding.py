"""Whether a tensor is one rank's shard of a larger one."""

import sys
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch.nn.parameter import is_lazy

from tp_core.errors import ModelError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

__all__ = ["SHARDED_ATTRIBUTE", "check_initialized", "check_no_first_fsdp", "is_dtensor", "is_sharded"]

SHARDED_ATTRIBUTE = "tp_sharded"
"""A parameter with this attribute set to true holds one shard of a larger one."""


def is_dtensor(tensor: torch.Tensor) -> "TypeGuard[DTensor]":
    """Return whether a tensor is a DTensor; without importing them, which takes a while."""
    return hasattr(tensor, "device_mesh")


def is_sharded(parameter: torch.Tensor) -> bool:
    """Return whether a parameter is one rank's shard: a DTensor, or marked with ``tp_sharded``."""
    return bool(getattr(parameter, SHARDED_ATTRIBUTE, False)) or is_dtensor(parameter)


def check_initialized(model: torch.nn.Module) -> None:
    """Make sure that every parameter and buffer has a shape.

    Raises:
        ModelError: One is of a lazy module that has not seen a batch.
    """
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            msg = (
                f"the model's {name!r} has no shape yet: it is of a lazy module, which takes it from its "
                "first batch; call the model on one before it is given, and make the optimizer after that"
            )
            raise ModelError(msg)


def check_no_first_fsdp(model: torch.nn.Module) -> None:
    """Make sure that nothing in a model was wrapped by torch's first FSDP.

    Raises:
        ModelError: A module is a ``FullyShardedDataParallel``.
    """
    # Where nobody has imported it, nobody has used it; importing it takes long.
    torch_fsdp = sys.modules.get("torch.distributed.fsdp")
    if torch_fsdp is None:
        return
    for name, module in model.named_modules():
        if isinstance(module, torch_fsdp.FullyShardedDataParallel):
            what = f"its {name!r}" if name else "it"
            msg = (
                f"the model is wrapped already: {what} is a FullyShardedDataParallel, torch's first FSDP, "
                "whose flat parameters no other backend and no checkpoint of here reads; give the plain "
                "module, which backend 'fsdp' shards"
            )
            raise ModelError(msg)
