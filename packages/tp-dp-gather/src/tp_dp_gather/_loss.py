"""A criterion on every device, so that outputs need not travel to one."""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tp_core import to_device
from tp_core.data import Scattering
from tp_core.errors import ConfigError
from tp_core.replicas import Replicas

Criterion = Callable[[Any, Any], Tensor]

_BY_CLASS = (F.cross_entropy, F.nll_loss)
_IGNORED = -100  # torch's default for ignore_index of both


def parallel_loss(
    criterion: Criterion,
    outputs: Sequence[Any],
    targets: Any,
    *,
    replicas: Replicas,
    device: torch.device,
    scattering: Scattering,
    reduction: str | None,
) -> Tensor:
    """Return ``criterion(whole output, targets)``, computed where the parts of the output are.

    Collectives: forward scatters the targets and gathers the parts' losses; backward scatters the loss's
    gradient to the parts.
    """
    if not isinstance(outputs, tuple | list) or not 0 < len(outputs) <= len(replicas):
        if isinstance(outputs, tuple | list):
            got = f"{len(outputs)} of them"
        else:
            got = type(outputs).__name__
        msg = (
            f"outputs must be 1 to {len(replicas)} parts, one per device, got {got}; make them with "
            "gather_to_one_device=False or except_keywords"
        )
        raise ConfigError(msg)
    counts = [_rows(output, scattering, i) for i, output in enumerate(outputs)]
    parts = list(zip(outputs, _targets(targets, counts, scattering), replicas.devices, strict=False))
    own = _own_reduction(criterion)
    if own is not None and reduction is not None and own != reduction:
        msg = f"reduction={reduction!r} was asked for, and {_name(criterion)} itself has reduction={own!r}"
        raise ConfigError(msg)
    reduction = reduction or own
    weigh = _mean_divisor(criterion)

    def compute(replica: nn.Module, part: Any) -> tuple[Tensor, Any]:
        output, target, where = part
        target = to_device(target, where)
        function = replica if replicas.module is criterion else criterion
        loss = function(output, target)
        if not isinstance(loss, Tensor):
            msg = f"the criterion must return a tensor, got a {type(loss).__name__}; let it return the loss"
            raise ConfigError(msg)
        weight = None if weigh is None else weigh(function, target)
        return loss, weight

    results = replicas.run(compute, parts)
    losses = [loss.to(device) for loss, _ in results]
    is_vector = losses[0].dim() > 0
    if reduction is None and not is_vector:
        msg = (
            f"how {_name(criterion)} reduces its losses is not known, so the parts' losses cannot be "
            'combined; pass reduction="mean" or reduction="sum"'
        )
        raise ConfigError(msg)
    if reduction is not None and is_vector != (reduction == "none"):
        shape = tuple(losses[0].shape)
        msg = f"the reduction is {reduction!r}, and the criterion returned a loss of shape {shape}"
        raise ConfigError(msg)
    if is_vector:
        return torch.cat(losses, min(scattering.dim, losses[0].dim() - 1))
    stacked = torch.stack(losses)
    if reduction == "sum":
        return stacked.sum()
    if weigh is None:
        weights = torch.tensor(counts, dtype=stacked.dtype, device=device)
    else:
        weights = torch.stack([weight.to(device) for _, weight in results]).to(stacked.dtype)
    # A part with nothing that counts has the loss 0/0, and a weight of 0.
    shares = weights / weights.sum()
    return torch.where(weights > 0, stacked, torch.zeros_like(stacked)).mul(shares).sum()


def _rows(output: Any, scattering: Scattering, part: int) -> int:
    rows = scattering.rows({"outputs": output})
    if rows is None:
        msg = f"part {part} of the outputs has no rows along dim {scattering.dim}: {type(output).__name__}"
        raise ConfigError(msg)
    return rows


def _targets(targets: Any, counts: list[int], scattering: Scattering) -> list[Any]:
    if isinstance(targets, tuple | list):
        if len(targets) != len(counts):
            msg = f"there are {len(counts)} parts of the output and {len(targets)} of the targets"
            raise ConfigError(msg)
        return list(targets)
    rows = scattering.rows({"targets": targets})
    if rows != sum(counts):
        msg = f"the targets have {rows} rows along dim {scattering.dim}, and the outputs have {sum(counts)}"
        raise ConfigError(msg)
    return [part["targets"] for part in scattering.parts({"targets": targets}, counts)]


def _own_reduction(criterion: Any) -> str | None:
    """Return how ``criterion`` reduces: "none", "mean" or "sum", or ``None`` where that is unknown.

    Read from its ``.reduction``, a keyword that it is bound to, or the default in its signature.
    """
    keywords, function = _unbound(criterion)
    if {"size_average", "reduce"} & {k for k, v in keywords.items() if v is not None}:
        return None  # torch's deprecated arguments
    reduction = keywords.get("reduction", getattr(function, "reduction", None))
    if reduction is None and not isinstance(function, nn.Module):
        try:
            reduction = inspect.signature(function).parameters["reduction"].default
        except (KeyError, TypeError, ValueError):
            return None
    if reduction == "batchmean":  # a mean over the rows, and parts are weighted by rows
        return "mean"
    if isinstance(reduction, str):
        return reduction
    return None


def _unbound(criterion: Any) -> tuple[dict[str, Any], Any]:
    """Return the keywords that a criterion is bound to, and what it is without them."""
    keywords: dict[str, Any] = {}
    while True:
        if isinstance(criterion, partial):
            keywords = {**criterion.keywords, **keywords}
            criterion = criterion.func
        elif isinstance(getattr(criterion, "_orig_mod", None), nn.Module):  # torch.compile's private name
            criterion = criterion._orig_mod
        else:
            return keywords, criterion


def _name(criterion: Any) -> str:
    keywords, function = _unbound(criterion)
    name = getattr(function, "__qualname__", type(function).__name__)
    if keywords:
        return f"{name} with {sorted(keywords)}"
    return str(name)


def _mean_divisor(criterion: Any) -> Callable[[Any, Tensor], Tensor] | None:
    """Return the divisor of this criterion's mean, where it is not the number of rows."""
    keywords, function = _unbound(criterion)
    if function not in _BY_CLASS and not isinstance(function, nn.CrossEntropyLoss | nn.NLLLoss):
        return None

    def divisor(replica: Any, target: Tensor) -> Tensor:
        if target.is_floating_point():  # probabilities of classes: the mean is over rows
            return torch.tensor(float(target.shape[0]), device=target.device)
        _, own = _unbound(replica)  # the replica's weights are on its device
        ignored = keywords.get("ignore_index", getattr(own, "ignore_index", _IGNORED))
        weights = keywords.get("weight", getattr(own, "weight", None))
        counted = target[target != ignored]
        if weights is None:
            return torch.tensor(float(counted.numel()), device=target.device)
        weight: Tensor = weights.to(target.device)[counted]
        return weight.sum()

    return divisor
