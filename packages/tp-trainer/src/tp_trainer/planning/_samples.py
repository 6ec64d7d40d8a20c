"""Footprints and operators of a step for numbers of samples: measured on stand-ins, or in between."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from tp_core import tree_map
from tp_core.jobs import Footprint, Precision, Recomputation

from tp_trainer._memory._footprint import measure_footprint
from tp_trainer._memory._operators import OperatorLog
from tp_trainer._memory._requirements import resized
from tp_trainer.planning._machine import Operators

_SAME = {"weights", "gradients", "optimizer", "update", "attentions"}
"""What does not grow with the samples."""
_SLOW_S = 1.5
"""Seconds of a measurement from which on the sizes between two are computed from these."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a device with the whole model needs for some samples."""

    footprint: Footprint
    forward: Operators
    backward: Operators
    update: Operators


@dataclass(slots=True)
class Subject:
    """What is planned for: as :func:`tp_trainer.estimate` takes it."""

    model: nn.Module
    optimizer: Optimizer | None
    batch: Any
    step: Callable[[Any, Any], Any]
    precision: Precision
    _updated: Measured | None = None  # by the optimizer, which is the same for all samples

    def measure(self, samples: int, recomputation: Recomputation) -> Measured:
        """Measure a step with some samples on stand-ins."""
        log = OperatorLog()
        footprint = measure_footprint(
            self.model,
            self.optimizer if self._updated is None else None,
            resized(self.batch, samples),
            self.step,
            precision=self.precision,
            recomputation=recomputation,
            operators=log,
        )
        update = Operators.of(log.update)
        if self._updated is not None:
            before = self._updated.footprint
            footprint = replace(footprint, optimizer=before.optimizer, update=before.update)
            update = self._updated.update
        found = Measured(footprint, Operators.of(log.forward), Operators.of(log.backward), update)
        if self._updated is None and not footprint.unknown:
            self._updated = found
        return found

    def measure_all(
        self, sizes: Iterable[int], recomputations: Iterable[Recomputation]
    ) -> dict[tuple[int, Recomputation], Measured]:
        """Measure each number of samples; where that takes long, the smallest and the largest one.

        There, what every second block computes again is the mean of none and all. What cannot be measured
        is left out, unless nothing can.
        """
        wanted = sorted(set(sizes))
        found: dict[tuple[int, Recomputation], Measured] = {}
        is_slow = False
        for what in sorted(recomputations, key=lambda way: way == "every 2nd block"):
            if is_slow and what == "every 2nd block" and (wanted[0], "every block") in found:
                for n in wanted:
                    found[n, what] = between(found[n, "nothing"], found[n, "every block"], 0.5)
                continue
            began = perf_counter()
            first = self.measure(wanted[0], what)
            if first.footprint.unknown and found:
                continue
            ends = {wanted[0]: first}
            if len(wanted) > 1:
                ends[wanted[-1]] = self.measure(wanted[-1], what)
            is_slow = is_slow or perf_counter() - began > _SLOW_S * len(ends)
            for samples in wanted:
                if samples in ends:
                    found[samples, what] = ends[samples]
                elif is_slow and not first.footprint.unknown:
                    weight = (samples - wanted[0]) / (wanted[-1] - wanted[0])
                    found[samples, what] = between(first, ends[wanted[-1]], weight)
                else:
                    found[samples, what] = self.measure(samples, what)
        return found


def between(low: Measured, high: Measured, weight: float) -> Measured:
    """Return what lies between two measurements: all of it grows in a straight line."""

    def mean(first: Any, last: Any) -> Any:
        if isinstance(first, Mapping):
            return {key: mean(n, last.get(key, n)) for key, n in first.items()}
        return round(first + (last - first) * weight) if isinstance(first, int) else first

    a, b = low.footprint.to_dict(), high.footprint.to_dict()
    footprint = Footprint(**{name: a[name] if name in _SAME else mean(a[name], b[name]) for name in a})
    return Measured(
        footprint,
        low.forward.between(high.forward, weight),
        low.backward.between(high.backward, weight),
        high.update,
    )


def with_length(batch: Any, length: int) -> Any:
    """Return a batch with sequences of another length: its first tokens, repeated if needed.

    The sequence is the second dimension of its first tensor with two, and of all that are as long there.
    """
    sizes: list[int] = []
    tree_map(lambda leaf: sizes.append(leaf.shape[1]) if _has_two(leaf) else None, batch)
    if not sizes:
        return batch

    def resize(leaf: Any) -> Any:
        if not _has_two(leaf) or leaf.shape[1] != sizes[0]:
            return leaf
        return leaf[:, torch.arange(length, device=leaf.device) % sizes[0]]

    return tree_map(resize, batch)


def _has_two(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.dim() > 1
