"""Optimizers whose parameters become shards."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tp_core._steps._optimizer_kinds import whole_matrix_optimizer
from tp_core._tensors._sharding import is_dtensor
from tp_core.errors import ConfigError
from tp_core.state import Place, fill_from_whole
from tp_core.state._optimizers import is_zero_redundancy

__all__ = ["check_optimizer", "move_state"]


def check_optimizer(optimizer: Optimizer) -> None:
    """Make sure that an optimizer treats each element by itself, as shards need it.

    LBFGS does not, and is right where it can join shards without padding: where all of them are of one size.

    Raises:
        ConfigError: The optimizer has shards, and computes with whole matrices, shards its state itself, or
            torch has no such step for shards.
    """
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(map(is_dtensor, parameters)):
        return
    if type(optimizer) is torch.optim.LBFGS and all(map(_is_even, parameters)):
        return
    name = whole_matrix_optimizer(optimizer)
    if name is not None:
        msg = (
            f"{name} computes with whole matrices or with norms of them, and fully sharded parameters would "
            "be this rank's shards: other updates than on one device. Take an optimizer that treats elements "
            "one by one, such as AdamW or SGD, or the backend 'ddp', whose ranks have whole parameters"
        )
        raise ConfigError(msg)
    fused = any(group.get("fused") for group in optimizer.param_groups)
    if fused and not isinstance(optimizer, torch.optim.Adam):  # AdamW is one
        msg = (
            f"torch has no fused {type(optimizer).__name__} for DTensors, which the parameters are "
            "here; leave fused=True out"
        )
        raise ConfigError(msg)
    if isinstance(optimizer, torch.optim.Rprop):  # it assigns by a mask, which DTensors cannot
        msg = (
            f"torch has no {type(optimizer).__name__} for DTensors, which the parameters are here; take "
            "another optimizer, such as AdamW or SGD, or the backend 'ddp'"
        )
        raise ConfigError(msg)
    if is_zero_redundancy(optimizer):
        msg = (
            "ZeroRedundancyOptimizer gives each rank the state of other whole parameters, and here "
            "parameters and state are sharded by the backend; give the optimizer that it wraps (its "
            "optimizer_class), made from model.parameters()"
        )
        raise ConfigError(msg)


def _is_even(parameter: Any) -> bool:
    """Return whether a parameter is trained, and cut into shards of one size."""
    if not is_dtensor(parameter) or not parameter.requires_grad:
        return False
    shards: int = parameter.device_mesh.size(parameter.device_mesh.ndim - 1)
    return parameter.numel() > 0 and parameter.size(0) % shards == 0


def move_state(optimizer: Optimizer, parameter: Tensor, shard: nn.Parameter) -> None:
    """Give a shard its part of what the optimizer keeps of the parameter that it took the place of."""
    if parameter not in optimizer.state:
        return

    def part(value: object) -> object:
        if not isinstance(value, Tensor) or value.shape != parameter.shape:
            return value
        place = Place(lambda _, whole: whole, shard, value.dtype)
        fill_from_whole(place.target, value)
        return place.take()

    with torch.no_grad():
        kept = optimizer.state.pop(parameter)
        optimizer.state[shard] = {key: part(value) for key, value in kept.items()}
