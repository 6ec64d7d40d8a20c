"""Optimizers whose parameters become shards."""

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from tp_core._steps._optimizer_kinds import whole_matrix_optimizer
from tp_core.errors import ConfigError
from tp_core.state import Place, fill_from_whole
from tp_core.state._optimizers import is_zero_redundancy

__all__ = ["check_optimizer", "move_state"]


def check_optimizer(optimizer: Optimizer) -> None:
    """Make sure that an optimizer treats each element by itself, as shards need it.

    Raises:
        ConfigError: The optimizer computes with whole matrices, shards its state itself, or is fused where
            torch has no such step for shards.
    """
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
    if is_zero_redundancy(optimizer):
        msg = (
            "ZeroRedundancyOptimizer gives each rank the state of other whole parameters, and here "
            "parameters and state are sharded by the backend; give the optimizer that it wraps (its "
            "optimizer_class), made from model.parameters()"
        )
        raise ConfigError(msg)


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
