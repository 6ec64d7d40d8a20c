"""Gradients of which each rank holds a part: their norm, and those that every rank holds whole."""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tp_core._tensors._sharding import is_dtensor

__all__ = ["WholeParameters", "local_gradients", "total_shard_norm"]


def local_gradients(model: nn.Module) -> list[Tensor]:
    """Return what this rank holds of the gradients, where it holds anything: no copies."""
    local = [_local(p.grad) for p in model.parameters() if p.grad is not None]
    return [grad for grad in local if grad.numel()]


@torch.no_grad()
def total_shard_norm(model: nn.Module, norm_type: float, *, device: torch.device) -> Tensor:
    """Return the norm of the whole gradient: a scalar tensor, equal on all ranks.

    Args:
        model: The sharded model.
        norm_type: Which norm; ``inf`` for the largest absolute value.
        device: Where ranks exchange tensors.

    Collectives: one all-reduce of a number over the ranks that hold the model together.
    """
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    split: list[Any] = [grad for grad in grads if is_dtensor(grad)]
    whole = [grad for grad in grads if not is_dtensor(grad)]
    dtype = grads[0].dtype if grads else torch.float32
    total = _power([grad.to_local() for grad in split], norm_type, device)
    if split:
        # The last axis is that of the shards; another one has copies, which count once.
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
    # Squares of large gradients are beyond float32.
    norm = norm.to(device, torch.float32 if device.type == "mps" else torch.float64)
    return norm if norm_type == math.inf else norm**norm_type


def _local(tensor: Tensor) -> Tensor:
    dtensor: Any = tensor
    local: Tensor = dtensor.to_local() if is_dtensor(tensor) else tensor
    return local


class WholeParameters:
    """Parameters that every rank holds whole: those that cannot be gathered as one tensor with the others.

    Their gradients are averaged over the ranks when they are complete.

    Args:
        parameters: Which they are.
        group: The ranks that read different samples; ``None`` for all.
    """

    def __init__(self, parameters: list[nn.Parameter], group: dist.ProcessGroup | None = None) -> None:
        self.reduces = True
        self._group = group
        for parameter in parameters:
            if parameter.requires_grad and parameter.numel():
                parameter.register_post_accumulate_grad_hook(self._average)

    def _average(self, parameter: Tensor) -> None:
        """Average a gradient, with what was added up in it before, which is the same on all ranks."""
        if self.reduces and parameter.grad is not None:
            dist.all_reduce(parameter.grad, group=self._group)
            parameter.grad.div_(dist.get_world_size(self._group))
