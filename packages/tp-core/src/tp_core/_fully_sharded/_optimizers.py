"""Optimizers over shards, and sharded gradients."""

import math
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from tp_core._tensors._slices import is_dtensor
from tp_core.errors import ConfigError
from tp_core.state import Place, fill_from_whole
from tp_core.state._optimizers import is_zero_redundancy

# Their steps divide by norms of a whole matrix, orthogonalize or factorize it, or take products of all
# parameters: on a shard they would compute another update, without an error.
_WHOLE_MATRIX = re.compile(
    r"muon|adafactor|lbfgs|shampoo|galore|kfac|lamb$|lars$|^(soap|came|apollo|novograd|scion|kron|psgd)$",
    re.IGNORECASE,
)


def whole_matrix_optimizer(optimizer: Optimizer) -> str | None:
    """Return the name of an optimizer's class if its step depends on whole matrices, else ``None``.

    On a rank's shard of a matrix it would make another update than on the whole. The check goes by the
    names of its class and base classes.

    Example:
        >>> weight = torch.zeros(2, 2, requires_grad=True)
        >>> whole_matrix_optimizer(torch.optim.LBFGS([weight]))
        'LBFGS'
        >>> whole_matrix_optimizer(torch.optim.SGD([weight]))
    """
    return next((c.__name__ for c in type(optimizer).__mro__ if _WHOLE_MATRIX.search(c.__name__)), None)


# -- gradients -------------------------------------------------------------------------------------


def local_gradients(model: nn.Module) -> list[Tensor]:
    """Return the local parts of the gradients, without copies; empty ones are left out."""
    local = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    return [grad for grad in local if grad.numel()]


@torch.no_grad()
def total_shard_norm(model: nn.Module, norm_type: float, *, device: torch.device) -> Tensor:
    """Return the norm of the whole gradient: a scalar tensor, equal on all ranks.

    Args:
        model: The sharded model.
        norm_type: The order of the norm; ``inf`` for the largest absolute value.
        device: The device of the collective.

    Collective: one all-reduce of a number over the ranks that hold the model together.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    split: list[Any] = [grad for grad in grads if is_dtensor(grad)]
    whole = [grad for grad in grads if not is_dtensor(grad)]
    dtype = grads[0].dtype if grads else torch.float32
    total = _power([grad.to_local() for grad in split], norm_type, device)
    if split:
        # Over the last axis only, the shards': along another axis are copies, which must count once.
        group = split[0].device_mesh.get_group(split[0].device_mesh.ndim - 1)
        operation = dist.ReduceOp.MAX if norm_type == math.inf else dist.ReduceOp.SUM
        dist.all_reduce(total, operation, group=group)
    others = _power(whole, norm_type, device)
    if norm_type == math.inf:
        return torch.maximum(total, others).to(dtype)
    return ((total + others) ** (1 / norm_type)).to(dtype)


def _power(grads: list[Tensor], norm_type: float, device: torch.device) -> Tensor:
    """Return the sum of the elements' powers, or their maximum; 0 for none."""
    norm = nn.utils.get_total_norm([grad for grad in grads if grad.numel()], norm_type)
    # float64, as squares of large gradients overflow float32; mps has none.
    norm = norm.to(device, torch.float32 if device.type == "mps" else torch.float64)
    return norm if norm_type == math.inf else norm**norm_type


def _local(tensor: Tensor) -> Tensor:
    dtensor: Any = tensor
    local: Tensor = dtensor.to_local() if is_dtensor(tensor) else tensor
    return local


class WholeParameters:
    """Parameters that every rank holds whole, since torch cannot gather them with the others.

    Collective: in backward, one all-reduce for each gradient once it is complete.

    Args:
        parameters: The parameters.
        group: The ranks that read different samples; ``None`` for all.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
        self.reduces = True
        self._group = group
        for parameter in parameters:
            if parameter.requires_grad and parameter.numel():
                parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: Tensor) -> None:
        """Average a gradient; earlier gradients in the same tensor are equal on all ranks, and stay.

        Collective: one all-reduce over the group.
        """
        if self.reduces and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=self._group)
            parameter.grad.div_(dist.get_world_size(self._group))


# -- optimizers ------------------------------------------------------------------------------------


def check_optimizer(optimizer: Optimizer) -> None:
    """Check that an optimizer treats each element by itself, as shards need it.

    LBFGS does not, but is right where it can concatenate shards without padding: with shards of one size.

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
            "one by one, such as AdamW or SGD, or the backend 'ddp', with whole parameters on each rank"
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
    """Move an optimizer's state of a parameter to the shard that replaces it, cut to the shard's part."""
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
