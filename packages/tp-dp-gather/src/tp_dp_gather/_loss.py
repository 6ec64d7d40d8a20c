"""A criterion on every device, so that outputs need not travel to one."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from tp_core import recursive_to
from tp_core.errors import ConfigError
from tp_core.replicas import Replicas

from tp_dp_gather._scatter import rows_of, scatter

__all__ = ["parallel_loss"]

Criterion = Callable[[Any, Any], Tensor]


def parallel_loss(
    criterion: Criterion,
    outputs: Sequence[Any],
    targets: Any,
    *,
    replicas: Replicas,
    device: torch.device,
    dim: int,
    reduction: str | None,
) -> Tensor:
    """Return ``criterion(whole output, targets)``, computed where the parts of the output are.

    Args:
        criterion: A loss module or function of an output and a target.
        outputs: The parts of the output, one per device.
        targets: The whole target, or its parts.
        replicas: Those of the criterion, if it has weights; else any, for their threads.
        device: Where the loss goes.
        dim: The dimension of the rows.
        reduction: "mean" or "sum"; by default the criterion's own, or "mean" where it has none.

    Raises:
        ConfigError: The outputs are no parts, or the targets do not go with them.
    """
    if not isinstance(outputs, tuple | list) or not 0 < len(outputs) <= len(replicas):
        what = f"{len(outputs)} of them" if isinstance(outputs, tuple | list) else type(outputs).__name__
        msg = (
            f"outputs must be 1 to {len(replicas)} parts, one per device, got {what}; make them with "
            "gather_to_one_device=False or except_keywords"
        )
        raise ConfigError(msg)
    counts = [_rows(output, dim, i) for i, output in enumerate(outputs)]
    parts = list(zip(outputs, _targets(targets, counts, dim), replicas.devices, strict=False))
    how = reduction or getattr(criterion, "reduction", "mean")
    weigh = _weighting(criterion)

    def compute(replica: nn.Module, part: Any) -> tuple[Tensor, Any]:
        output, target, where = part
        target = recursive_to(target, where, non_blocking=where.type != "cpu")
        function = replica if replicas.module is criterion else criterion
        return function(output, target), None if weigh is None else weigh(function, target)

    results = replicas.run(compute, parts)
    losses = [loss.to(device) for loss, _ in results]
    if losses[0].dim() > 0:
        return torch.cat(losses, min(dim, losses[0].dim() - 1))
    stacked = torch.stack(losses)
    if how == "sum":
        return stacked.sum()
    weights = (
        torch.tensor(counts, dtype=stacked.dtype, device=device)
        if weigh is None
        else torch.stack([w.to(device) for _, w in results]).to(stacked.dtype)
    )
    # A part with nothing that counts has the loss 0/0, and a weight of 0.
    shares = weights / weights.sum()
    return torch.where(weights > 0, stacked, torch.zeros_like(stacked)).mul(shares).sum()


def _rows(output: Any, dim: int, part: int) -> int:
    rows = rows_of(output, dim)
    if rows is None:
        msg = f"part {part} of the outputs has no rows along dim {dim}: {type(output).__name__}"
        raise ConfigError(msg)
    return rows


def _targets(targets: Any, counts: list[int], dim: int) -> list[Any]:
    if isinstance(targets, tuple | list):
        if len(targets) != len(counts):
            msg = f"there are {len(counts)} parts of the output and {len(targets)} of the targets"
            raise ConfigError(msg)
        return list(targets)
    rows = rows_of(targets, dim)
    if rows != sum(counts):
        msg = f"the targets have {rows} rows along dim {dim}, and the outputs have {sum(counts)}"
        raise ConfigError(msg)
    return scatter(targets, counts, dim)


def _weighting(criterion: Any) -> Callable[[Any, Tensor], Tensor] | None:
    """Return what a mean of this criterion divides by, where that is not the number of rows."""
    if not isinstance(criterion, nn.CrossEntropyLoss | nn.NLLLoss):
        return None

    def divisor(replica: Any, target: Tensor) -> Tensor:
        if target.is_floating_point():  # probabilities of classes: the mean is over rows
            return torch.tensor(float(target.shape[0]), device=target.device)
        counted = target[target != replica.ignore_index]
        if replica.weight is None:
            return torch.tensor(float(counted.numel()), device=target.device)
        weight: Tensor = replica.weight[counted]
        return weight.sum()

    return divisor
