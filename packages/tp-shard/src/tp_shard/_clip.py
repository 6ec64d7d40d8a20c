"""Clipping by the norm of the whole gradient, of which each rank has a part."""

import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core.errors import NonFiniteLossError

from tp_shard._group import Group, GroupLike, as_group
from tp_shard._marks import get_split, holds_shard

__all__ = ["clip_grad_norm_"]


@torch.no_grad()
def clip_grad_norm_(
    parameters: nn.Module | Tensor | Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    group: GroupLike = None,
) -> Tensor:
    """Scale gradients in place so that the norm of the whole gradient is at most ``max_norm``.

    Shards of all ranks count, and parameters that all ranks have count once: the result is that of
    ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, and the same on all ranks.

    Args:
        parameters: A model, or parameters; on every rank those of the same layers.
        max_norm: The largest norm.
        norm_type: Which norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: Whether to raise if the norm is not finite.
        foreach: As torch takes it.
        group: The ranks; the current model-parallel group by default.

    Returns:
        The norm before scaling, a scalar tensor.

    Raises:
        NonFiniteLossError: The norm is not finite, and that was to be an error; on every rank.

    Collectives: an all-reduce of one number.

    Example:
        >>> model = ts.nn.ParallelLinear(4, 4, dim=0)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> bool(clip_grad_norm_(model, 1.0) > 1)
        True
    """
    if isinstance(parameters, nn.Module):
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    everything = [p for p in parameters if p.grad is not None]
    ranks = as_group(group)
    split = [p for p in everything if holds_shard(p)] if ranks.size > 1 else []
    whole = [p.grad for p in everything if p.grad is not None and not (split and holds_shard(p))]
    norm = nn.utils.get_total_norm(whole, norm_type, foreach=foreach)
    if ranks.size > 1:
        own = [part for p in split for part in _counted(p, ranks)]
        shards = nn.utils.get_total_norm(own, norm_type, foreach=foreach)
        device = everything[0].device if everything else torch.device("cpu")
        norm = _join(norm.to(device), shards.to(device), norm_type, ranks.handle)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        msg = f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped"
        raise NonFiniteLossError(msg)
    nn.utils.clip_grads_with_norm_(everything, max_norm, norm, foreach)
    return norm


def _join(whole: Tensor, shards: Tensor, norm_type: float, group: dist.ProcessGroup) -> Tensor:
    """Return the norm of what all ranks have and of the shards of all of them."""
    wide, dtype = shards.double(), torch.promote_types(whole.dtype, shards.dtype)
    if norm_type == math.inf:
        dist.all_reduce(wide, dist.ReduceOp.MAX, group=group)
        return torch.maximum(whole.double(), wide).to(dtype)
    total = wide.pow(norm_type)
    dist.all_reduce(total, group=group)
    return (whole.double().pow(norm_type) + total).pow(1 / norm_type).to(dtype)


def _counted(parameter: Tensor, group: Group) -> list[Tensor]:
    """Return the parts of a shard's gradient that no earlier rank has too."""
    grad = parameter.grad
    if grad is None:
        return []
    split = get_split(parameter, group)
    if split is None or split.is_even:
        return [grad]
    earlier = {r for pieces in split.ranges[: group.rank] for r in pieces}
    at, parts = 0, []
    for start, stop in split.ranges[group.rank]:
        if (start, stop) not in earlier:
            parts.append(grad.narrow(split.dim, at, stop - start))
        at += stop - start
    return parts
