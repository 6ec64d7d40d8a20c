"""Batches that `verify` makes beside the user's, of the kind of the first one."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from tp_core.compare import WithoutDropout, named_tensors, other_batches, watched_tables

from tp_verify._strategy import Step, loss_and_weight
from tp_verify._training_task import TrainingTask, build_model, cast

_STEPS = 3  # at least, on the user's batches and these; one more where the user gives as many
_SAME = 2  # of the user's own shapes


@dataclass(frozen=True, slots=True)
class OwnBatches:
    """Batches of the kind of the user's first one.

    Attributes:
        resized: One of another length, if the plain model takes it.
        same: Others of the same shapes.
        varied: What differs from the user's batch, beside lengths: one phrase each.
    """

    resized: Sequence[Any] = ()
    same: Sequence[Any] = ()
    varied: Sequence[str] = ()

    def choices(self, batches: int) -> list[list[Any]]:
        """Return what to try, beside a number of the user's batches; where ranks refuse it, the next."""
        count = max(1, _STEPS - batches)
        tried = [[*self.resized, *self.same][:count], list(self.same[:count]), []]
        return [one for n, one in enumerate(tried) if one or n == len(tried) - 1]


def own_batches(task: TrainingTask) -> OwnBatches:
    """Return batches with other values, lengths and masks with which the plain model trains."""
    task = replace(task, dtype=torch.float64)
    model, batch = build_model(task), cast(task.batches[0], torch.float64)
    named = list(named_tensors(batch))
    with WithoutDropout(model), watched_tables(model, [tensor for _, tensor in named]) as tables:
        task.step(model, batch)
    resized: list[Any] = []
    same: list[Any] = []
    values: dict[str, None] = {}
    for other in other_batches(batch, tables, _sizes):
        tensors = dict(named_tensors(other))
        is_resized = any(tensors[place].shape != tensor.shape for place, tensor in named)
        kept, most = (resized, 1) if is_resized else (same, _SAME)
        drawn = [
            place
            for place, tensor in named
            if id(tensor) in tables
            or (tensors[place].shape == tensor.shape and not torch.equal(tensors[place], tensor))
        ]
        if len(kept) < most and (drawn or is_resized) and _takes(model, task.step, other):
            kept.append(other)
            values |= dict.fromkeys(drawn)
    masks = [place for place in values if "mask" in place]
    words = [place or "the tensor" for place in values if place not in masks]
    varied = [f"other values of {', '.join(words)}"] * bool(words)
    return OwnBatches(resized, same, varied + [f"padding in {', '.join(masks)}"] * bool(masks))


def _sizes(rows: int, places: int) -> list[tuple[int, int]]:
    """Return the rows and places to try: all of a batch's labels are in the longer one.

    The shorter one is for models that know as many places as the batch has. Half of them, or half more, can
    mostly be split as all of them can.
    """
    longer, shorter = places + max(1, places // 2), max(1, places // 2)
    return [(rows, longer), (rows, shorter), *[(rows, places)] * _SAME]


def _takes(model: nn.Module, step: Step, batch: Any) -> bool:
    """Return whether the plain model trains with a batch, in finite numbers."""
    model.zero_grad()
    try:
        with WithoutDropout(model):
            loss, _ = loss_and_weight(step(model, batch), batch)
        loss.backward()
    except Exception:  # noqa: BLE001 - what is made up may not suit the model
        return False
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return all(bool(tensor.isfinite().all()) for tensor in (loss, *gradients))
