"""From the parts' outputs of a step to the one output of the step."""

from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from tp_core import LossReduction, Parts
from tp_core.errors import StepError

from tp_tuple._collate import restore_order

__all__ = ["combine"]


def combine(outputs: Sequence[Any], parts: Parts, *, loss: LossReduction, device: torch.device) -> Any:
    """Return what the step would have returned for the whole batch.

    Losses that are means are averaged with the samples of their parts as weights; sums are added.
    Other numbers and scalars are averaged in the same way; other tensors are concatenated, in the
    order that the samples had before they were split. ``None`` stays ``None``.

    Raises:
        StepError: The parts returned different things, or what cannot be combined.
    """
    first = outputs[0]
    if isinstance(first, Mapping):
        for i, output in enumerate(outputs):
            if not isinstance(output, Mapping) or output.keys() != first.keys():
                msg = f"the step returned {_describe(first)} for part 0 and {_describe(output)} for part {i}"
                raise StepError(msg)
        return {key: _combine_value(key, [o[key] for o in outputs], parts, loss, device) for key in first}
    return _combine_value("loss", list(outputs), parts, loss, device)


def _combine_value(
    name: str, values: list[Any], parts: Parts, loss: LossReduction, device: torch.device
) -> Any:
    if all(v is None for v in values):
        return None
    if all(isinstance(v, Tensor) for v in values):
        moved = [v.to(device) for v in values]
        if name == "loss" or all(v.numel() == 1 for v in moved):
            return _average(moved, parts, total=name == "loss" and loss == "sum")
        if all(v.dim() for v in moved):
            joined = torch.cat(moved)
            return restore_order(joined, parts.order) if len(joined) == sum(parts.counts) else joined
    elif all(isinstance(v, Real) for v in values):
        return _average(values, parts, total=name == "loss" and loss == "sum")
    kinds = ", ".join(_describe(v) for v in values)
    msg = (
        f"the step's {name!r} must be a number or a tensor on every part, of one rank, got {kinds}; return "
        "the loss, or a dict with 'loss' and what to log"
    )
    raise StepError(msg)


def _average(values: list[Any], parts: Parts, *, total: bool) -> Any:
    if total:
        return sum(values[1:], values[0])
    samples = sum(parts.counts)
    weighted = [v * (n / samples) for v, n in zip(values, parts.counts, strict=True)]
    return sum(weighted[1:], weighted[0])


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    if isinstance(value, Mapping):
        return f"a dict of {sorted(map(str, value))}"
    return f"{type(value).__name__} {value!r:.40}"
