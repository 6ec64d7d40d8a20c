"""Clipping by the norm of the whole gradient, of which each rank has a part."""

import functools
import math
from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core.errors import NonFiniteLossError

from tp_shard._groups import _debug
from tp_shard._groups._group import Group, GroupLike, as_group
from tp_shard._shards._dtensors import local, part_of, sharded_over
from tp_shard._shards._marks import get_split, holds_shard
from tp_shard._shards._pieces import parts_of_whole
from tp_shard._training._drift import check_gradients

__all__ = ["clip_grad_norm_", "total_grad_norm"]

Axes = tuple[dist.ProcessGroup, ...]
"""The groups over which a gradient is cut."""


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
    ``torch.nn.utils.clip_grad_norm_`` on the unsharded model, and the same on all ranks. Gradients may be
    cut over copies of the model besides, as ``fully_shard`` does it.

    Args:
        parameters: A model, or parameters; on every rank those of the same layers.
        max_norm: The largest norm that is left as it is.
        norm_type: Which norm; ``inf`` for the largest absolute value.
        error_if_nonfinite: Whether to raise if the norm is not finite.
        foreach: As torch takes it.
        group: The ranks; the current model-parallel group by default.

    Returns:
        The norm of the whole gradient before scaling, a scalar tensor, the same on all ranks.

    Raises:
        NonFiniteLossError: The norm is not finite, and that was to be an error; on every rank.
        ConfigError: A gradient is a DTensor that is a sum yet to be made.
        DisagreementError: In debug mode, as :func:`check_gradients` says.

    Collectives: an all-reduce of one number; under ``fully_shard`` one of two numbers for each axis of its
    mesh that cuts gradients, too.

    Example:
        >>> model = ts.nn.ParallelLinear(4, 4, dim=0)
        >>> model(torch.ones(1, 4)).sum().backward()
        >>> bool(clip_grad_norm_(model, 1.0) > 1)
        True
    """
    if isinstance(parameters, nn.Module):
        if _debug.state.enabled:
            check_gradients(parameters, group=group)
        parameters = parameters.parameters()
    elif isinstance(parameters, Tensor):
        parameters = [parameters]
    everything = [p for p in parameters if p.grad is not None]
    norm = total_grad_norm(everything, norm_type, foreach=foreach, group=group)
    if error_if_nonfinite and not math.isfinite(norm.item()):
        msg = f"the norm of order {norm_type} of the gradients is {norm.item()}, so they cannot be clipped"
        raise NonFiniteLossError(msg)
    nn.utils.clip_grads_with_norm_(everything, max_norm, norm, foreach)
    return norm


@torch.no_grad()
def total_grad_norm(
    parameters: Iterable[Tensor], norm_type: float, *, foreach: bool | None = None, group: GroupLike = None
) -> Tensor:
    """Return the norm of the whole gradient, the same on all ranks; arguments as above.

    Collectives: as above.
    """
    everything = [p for p in parameters if p.grad is not None]
    ranks = as_group(group)
    tensor = () if ranks.process_group is None or ranks.size == 1 else (ranks.process_group,)
    # By the groups over which the gradients are cut. All ranks take part in all sums, even with nothing.
    gradients: dict[Axes, list[Tensor]] = {(): [], tensor: []}
    for parameter in everything:
        grad = parameter.grad
        if grad is None:
            continue
        if grad.is_sparse:  # rows that it lacks are 0
            grad = grad.coalesce().values()
        is_split = bool(tensor) and holds_shard(parameter)
        axes = sharded_over(grad) + (tensor if is_split else ())
        parts = _counted(parameter, grad, ranks) if is_split else [local(grad)]
        gradients.setdefault(axes, []).extend(part for part in parts if part.numel())
    device = local(everything[0]).device if everything else torch.device("cpu")
    norms = {
        axes: nn.utils.get_total_norm(own, norm_type, foreach=foreach).to(device)
        for axes, own in gradients.items()
    }
    dtype = functools.reduce(torch.promote_types, [norm.dtype for norm in norms.values()])
    return _join(norms, norm_type).to(dtype)


def _join(norms: dict[Axes, Tensor], norm_type: float) -> Tensor:
    """Return the norm of everything, from the norms of what this rank has, by the groups that cut it."""
    is_max = norm_type == math.inf
    wide = {axes: norm.double() if is_max else norm.double().pow(norm_type) for axes, norm in norms.items()}
    for group in dict.fromkeys(group for axes in norms for group in axes):
        cut = [axes for axes in norms if group in axes]
        values = torch.stack([wide[axes] for axes in cut])
        dist.all_reduce(values, dist.ReduceOp.MAX if is_max else dist.ReduceOp.SUM, group=group)
        wide.update(zip(cut, values.unbind(), strict=True))
    everything = torch.stack(list(wide.values()))
    return everything.max() if is_max else everything.sum().pow(1 / norm_type)


def _counted(parameter: Tensor, grad: Tensor, group: Group) -> list[Tensor]:
    """Return the parts of a shard's gradient that no earlier rank has too."""
    split = get_split(parameter, group)
    if split is None or split.is_even:
        return [local(grad)]
    return [part for _, part in parts_of_whole([part_of(grad)], split, group.rank, own=True)]
