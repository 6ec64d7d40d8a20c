"""Footprints and operators of a step for numbers of samples: measured on stand-ins, or computed from some.

Of a model with many like blocks, two and three are run. The difference is what each further block adds.
"""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from tp_core import tree_map
from tp_core.errors import ModelError
from tp_core.internal import repeated_blocks
from tp_core.jobs import Footprint, Precision, Recomputation

from tp_trainer._memory import OperatorLog, measure_footprint, resized
from tp_trainer.planning._machine import Operators

_STATES = ("weights", "gradients", "optimizer", "update")
_SAME = {*_STATES, "attentions"}
"""What does not grow with the samples."""
_SLOW_S = 0.3
"""Seconds of a measurement from which on many sizes between two are computed from these."""
_FEW_SIZES = 4
"""Sizes that are all run: times do not grow in a line where small operators stay in caches."""
_FEW = 2
_MANY = 6
"""The blocks that are run, beside one more, of a model that has so many or more."""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a device with the whole model needs for some samples."""

    footprint: Footprint
    forward: Operators
    backward: Operators
    update: Operators


class Subject:
    """What is planned for: as :func:`tp_trainer.estimate` takes it."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        batch: Any,
        step: Callable[[Any, Any], Any],
        precision: Precision,
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self._model, self._batch, self._step, self._precision = model, batch, step, precision
        self._blocks = _blocks_alike(model)
        log = OperatorLog()  # the optimizer's step is the same for all samples
        self._updated = measure_footprint(model, optimizer, precision=precision, device=device, operators=log)
        self._update = Operators.of(log.update)

    def measure(self, samples: int, recomputation: Recomputation) -> Measured:
        """Measure a step with some samples on stand-ins."""
        if self._blocks is not None:
            path, count = self._blocks
            low, high = (
                self._run(_with_blocks(self._model, path, n), samples, recomputation)
                for n in (_FEW, _FEW + 1)
            )
            known = not (low.footprint.unknown or high.footprint.unknown)
            if known and high.footprint.kept.keys() > low.footprint.kept.keys():
                found = between(low, high, count - _FEW)
                return replace(found, footprint=_with_all(found.footprint, low, high, path, count))
            self._blocks = None  # it does not go by the list of its blocks
        return self._run(self._model, samples, recomputation)

    def _run(self, model: nn.Module, samples: int, recomputation: Recomputation) -> Measured:
        log = OperatorLog()
        footprint = measure_footprint(
            model,
            None,
            resized(self._batch, samples),
            self._step,
            precision=self._precision,
            device=self._device,
            recomputation=recomputation,
            operators=log,
        )
        known = {
            name: getattr(self._updated, name) for name in ("weights", "gradients", "optimizer", "update")
        }
        return Measured(
            replace(footprint, **known), Operators.of(log.forward), Operators.of(log.backward), self._update
        )

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
            all_known = (wanted[0], "nothing") in found and (wanted[0], "every block") in found
            if what == "every 2nd block" and all_known and (is_slow or self._blocks is not None):
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
                elif is_slow and len(wanted) > _FEW_SIZES and not first.footprint.unknown:
                    weight = (samples - wanted[0]) / (wanted[-1] - wanted[0])
                    found[samples, what] = between(first, ends[wanted[-1]], weight)
                else:
                    found[samples, what] = self.measure(samples, what)
        return found


def between(low: Measured, high: Measured, weight: float) -> Measured:
    """Return what lies on the line through two measurements: between them, or beyond from 1 on."""

    def mean(first: Any, last: Any) -> Any:
        if isinstance(first, Mapping):
            return {key: mean(n, last.get(key, n)) for key, n in first.items()}
        if isinstance(first, list | tuple):
            return [mean(a, b) for a, b in zip(first, last, strict=True)]
        return round(first + (last - first) * weight) if isinstance(first, int) else first

    a, b = low.footprint.to_dict(), high.footprint.to_dict()
    footprint = Footprint(**{name: a[name] if name in _SAME else mean(a[name], b[name]) for name in a})
    return Measured(
        footprint,
        low.forward.between(high.forward, weight),
        low.backward.between(high.backward, weight),
        high.update,
    )


# -- Models of many blocks --------------------------------------------------------------------------


def _blocks_alike(model: nn.Module) -> tuple[str, int] | None:
    """Return the path of the list of a model's blocks and their number, if they are alike and many."""
    try:
        blocks = repeated_blocks(model)
    except ModelError:
        return None
    paths = {name.rpartition(".")[0] for name in blocks}
    path = paths.pop()
    if paths or not path or len(blocks) < _MANY:
        return None
    parent = model.get_submodule(path)
    kinds = {
        (type(m), *((name, p.shape, p.requires_grad) for name, p in m.named_parameters()))
        for m in blocks.values()
    }
    is_list = isinstance(parent, nn.ModuleList | nn.Sequential) and len(parent) == len(blocks)
    return (path, len(blocks)) if is_list and len(kinds) == 1 else None


def _with_blocks(model: nn.Module, path: str, count: int) -> nn.Module:
    """Return a model with the first blocks of it alone; it has the parameters of the given one."""
    found = copy.copy(model)
    modules = dict(model._modules)
    if path:
        name, _, rest = path.partition(".")
        child = modules[name]
        assert child is not None  # noqa: S101 - it is on the way to the blocks
        modules[name] = _with_blocks(child, rest, count)
    else:
        modules = dict(list(modules.items())[:count])
    found._modules = modules
    return found


def _with_all(found: Footprint, low: Measured, high: Measured, path: str, count: int) -> Footprint:
    """Return a footprint with the parts of all blocks: those of the middle one, but for the ends."""
    few, many = low.footprint, high.footprint
    first, last = (f"{path}.{i}" for i in (0, _FEW))

    def is_outside(name: str) -> bool:
        return not f"{name}.".startswith(f"{path}.") or name == path

    def named(values: Mapping[str, Any], i: int) -> dict[str, Any]:
        like = first if i == 0 else last if i == count - 1 else f"{path}.1"
        return {
            f"{path}.{i}{name[len(like) :]}": value
            for name, value in values.items()
            if f"{name}.".startswith(f"{like}.")
        }

    def of_all(name: str) -> dict[str, int]:
        outside = {n: v for n, v in getattr(found, name).items() if is_outside(n)}
        return outside | {n: v for i in range(count) for n, v in named(getattr(many, name), i).items()}

    # Gradients of later blocks come while activations of all blocks before are there.
    ahead = f"{path}.{_FEW - 1}"
    step = {
        name[len(last) :]: [b - a for a, b in zip(few.timeline[ahead + name[len(last) :]], both, strict=True)]
        for name, both in many.timeline.items()
        if name.startswith(f"{last}.")
    }
    timeline: dict[str, list[int]] = {}
    for name, both in many.timeline.items():
        if is_outside(name):
            timeline[name] = list(found.timeline.get(name, both))
        elif name.startswith(f"{last}.") and not any(not is_outside(n) for n in timeline):
            for i in reversed(range(count)):
                more = i - (0 if i == 0 else _FEW if i == count - 1 else 1)
                for block_name, values in named(many.timeline, i).items():
                    grown = step[block_name[len(f"{path}.{i}") :]]
                    timeline[block_name] = [v + more * g for v, g in zip(values, grown, strict=True)]
    return replace(
        found,
        attentions=few.attentions + (many.attentions - few.attentions) * (count - _FEW),
        # Late in the backward pass there are all gradients, and few activations.
        with_gradients=max(found.with_gradients, found.gradients),
        kept=of_all("kept"),
        passed=of_all("passed"),
        timeline=timeline,
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
