"""Footprints of a step for numbers of samples.

Of a model with many like blocks, two and three are run. The difference is what each further block adds.
"""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from tp_core.errors import ModelError
from tp_core.jobs import Footprint, Precision, Recomputation
from tp_core.modules import repeated_blocks

from tp_trainer._memory import measure_footprint, resized

_STATES = ("weights", "gradients", "optimizer", "update", "update_trace")
_SAME = {*_STATES, "attentions", "attention", "trace", "lower_trace"}
"""What does not grow with the samples."""
_FEW = 2
_MANY = 6
"""The blocks that are run, beside one more, of a model that has so many or more."""


class StepFootprints:
    """The footprints of a job's step, by the samples of a batch and by what is computed again.

    Args:
        model: The plain model; it may be on the meta device.
        optimizer: Its optimizer, if known.
        batch: A batch of any number of samples, if known.
        step: The step, if known.
        precision: As of the trainer.
        device: The device of the training.

    Attributes:
        unknown: Why the optimizer's state is not known; empty if it is, or there is no optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        batch: Any,
        step: Callable[[Any, Any], Any] | None,
        precision: Precision,
        device: torch.device | None = None,
    ) -> None:
        self._device = device
        self._model, self._batch, self._step, self._precision = model, batch, step, precision
        if batch is None or step is None:
            self._blocks = None
        else:
            self._blocks = _blocks_alike(model)
        self._footprints: dict[tuple[int, Recomputation], Footprint] = {}
        # The optimizer's step is the same for all samples.
        self._updated = measure_footprint(model, optimizer, precision=precision, device=device)
        is_assumed = optimizer is not None and self._updated.optimizer is None
        self.unknown = self._updated.unknown if is_assumed else ""

    def measure(self, samples: int, recomputation: Recomputation) -> Footprint:
        """Return the footprint of a device with the whole model that gets so many samples."""
        key = (samples, recomputation)
        if key not in self._footprints:
            self._footprints[key] = self._measured(samples, recomputation)
        return self._footprints[key]

    def _measured(self, samples: int, recomputation: Recomputation) -> Footprint:
        if self._blocks is None:
            return self._run(self._model, samples, recomputation)
        if recomputation == "every 2nd block":
            # One block more is not what each further block adds.
            none, all_blocks = self.measure(samples, "nothing"), self.measure(samples, "every block")
            half = between(none, all_blocks, 0.5)
            # Blocks of the same sizes in the same order, but for what is computed again.
            part = (half.activations or 0) / max(1, none.activations or 0)
            smaller = none.with_batch_of(part)
            return replace(half, trace=smaller.trace, lower_trace=smaller.lower_trace)
        path, count = self._blocks
        low = self._run(_with_blocks(self._model, path, _FEW), samples, recomputation)
        high = self._run(_with_blocks(self._model, path, _FEW + 1), samples, recomputation)
        is_known = not (low.unknown or high.unknown)
        if is_known and high.kept.keys() > low.kept.keys():
            return _with_all(between(low, high, count - _FEW), low, high, path, count)
        self._blocks = None  # it does not go by the list of its blocks
        return self._run(self._model, samples, recomputation)

    def _run(self, model: nn.Module, samples: int, recomputation: Recomputation) -> Footprint:
        footprint = measure_footprint(
            model,
            None,
            resized(self._batch, samples),
            self._step,
            precision=self._precision,
            device=self._device,
            recomputation=recomputation,
        )
        return replace(footprint, **{name: getattr(self._updated, name) for name in _STATES})


def between(low: Footprint, high: Footprint, weight: float) -> Footprint:
    """Return what lies on the line through two footprints: between them, or beyond from 1 on."""

    def mean(first: Any, last: Any) -> Any:
        if isinstance(first, Mapping):
            return {key: mean(n, last.get(key, n)) for key, n in first.items()}
        if isinstance(first, list | tuple):
            return [mean(a, b) for a, b in zip(first, last, strict=True)]
        if isinstance(first, int):
            return round(first + (last - first) * weight)
        return first

    a, b = low.to_dict(), high.to_dict()
    return Footprint(**{name: a[name] if name in _SAME else mean(a[name], b[name]) for name in a})


# -- Models of many blocks --------------------------------------------------------------------------


def _blocks_alike(model: nn.Module) -> tuple[str, int] | None:
    """Return the path of the list of a model's blocks and their number, if they are equal and many."""
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
    if is_list and len(kinds) == 1:
        return (path, len(blocks))
    return None


def _with_blocks(model: nn.Module, path: str, count: int) -> nn.Module:
    """Return a model with the first blocks of it alone; it has the parameters of the given one."""
    shortened = copy.copy(model)
    modules = dict(model._modules)
    if path:
        name, _, rest = path.partition(".")
        child = modules[name]
        assert child is not None  # noqa: S101 - it is on the way to the blocks
        modules[name] = _with_blocks(child, rest, count)
    else:
        modules = dict(list(modules.items())[:count])
    shortened._modules = modules
    return shortened


def _with_all(footprint: Footprint, few: Footprint, many: Footprint, path: str, count: int) -> Footprint:
    """Return a footprint with the parts of all blocks: those of the middle one, but for the ends."""
    first, last = (f"{path}.{i}" for i in (0, _FEW))

    def is_outside(name: str) -> bool:
        return not f"{name}.".startswith(f"{path}.") or name == path

    def named(values: Mapping[str, Any], i: int) -> dict[str, Any]:
        like = f"{path}.1"
        if i == 0:
            like = first
        elif i == count - 1:
            like = last
        return {
            f"{path}.{i}{name[len(like) :]}": value
            for name, value in values.items()
            if f"{name}.".startswith(f"{like}.")
        }

    def of_all(name: str) -> dict[str, int]:
        outside = {n: v for n, v in getattr(footprint, name).items() if is_outside(n)}
        return outside | {n: v for i in range(count) for n, v in named(getattr(many, name), i).items()}

    # Gradients of later blocks come while activations of all blocks before are there.
    ahead = f"{path}.{_FEW - 1}"
    step = {
        name[len(last) :]: [
            b - a for a, b in zip(few.timeline[ahead + name[len(last) :]], levels, strict=True)
        ]
        for name, levels in many.timeline.items()
        if name.startswith(f"{last}.")
    }
    timeline: dict[str, list[int]] = {}
    for name, levels in many.timeline.items():
        if is_outside(name):
            timeline[name] = list(footprint.timeline.get(name, levels))
        elif name.startswith(f"{last}.") and not any(not is_outside(n) for n in timeline):
            for i in reversed(range(count)):
                measured = 1
                if i == 0:
                    measured = 0
                elif i == count - 1:
                    measured = _FEW
                more = i - measured
                for block_name, values in named(many.timeline, i).items():
                    grown = step[block_name[len(f"{path}.{i}") :]]
                    timeline[block_name] = [v + more * g for v, g in zip(values, grown, strict=True)]
    return replace(
        footprint,
        trace=_repeated(many.trace, path, count),
        lower_trace=_repeated(many.lower_trace, path, count),
        attentions=few.attentions + (many.attentions - few.attentions) * (count - _FEW),
        # Late in the backward pass there are all gradients, and few activations.
        with_gradients=max(footprint.with_gradients, footprint.gradients),
        kept=of_all("kept"),
        passed=of_all("passed"),
        timeline=timeline,
    )


def _repeated(trace: Sequence[Sequence[Any]], path: str, count: int) -> list[Sequence[Any]]:
    """Extend the trace of a few blocks to all of them; it is empty if gradients are not computed in turn.

    The events of the block before the last one are repeated for each missing block.
    """
    events = list(trace)
    middle, last = f"{path}.{_FEW - 1}", f"{path}.{_FEW}"
    marks = [(what, name) for what, _, _, name in events]
    of_middle = [i for i, (what, name) in enumerate(marks) if what == "gradient" and _is_in(name, middle)]
    of_last = [i for i, (what, name) in enumerate(marks) if what == "gradient" and _is_in(name, last)]
    is_known = ("begin", middle) in marks and ("end", middle) in marks and of_middle and of_last
    if not is_known or of_last[-1] > of_middle[0]:
        return []
    begin, end = marks.index(("begin", middle)), marks.index(("end", middle)) + 1
    back, back_end = of_last[-1] + 1, of_middle[-1] + 1
    made = {number for what, number, _, _ in events[begin:end] if what in {"value", "fixed"}}
    made_again = {number for what, number, _, _ in events[back:back_end] if what in {"value", "fixed"}}
    own = made | made_again
    freed = {number for what, number, _, _ in events[begin:end] + events[back:back_end] if what == "free"}
    passed = sorted(made - freed)  # to the next block, whose backward pass frees them
    copies = range(_FEW - 1, count - 1)

    def numbered(number: int, block: int) -> int:
        return number + (block - copies[0]) * len(events) if number in own else number

    def copied(part: Sequence[Sequence[Any]], block: int) -> list[Sequence[Any]]:
        like = f"{path}.{block}"
        return [
            (what, numbered(number, block), n, like + name[len(middle) :] if _is_in(name, middle) else name)
            for what, number, n, name in part
            # What the block before has passed on, which here is another one.
            if block == copies[0] or what != "free" or number in own
        ]

    def rest(part: Sequence[Sequence[Any]]) -> list[Sequence[Any]]:
        like = f"{path}.{count - 1}"
        return [
            (what, numbered(number, copies[-1]), n, like + name[len(last) :] if _is_in(name, last) else name)
            for what, number, n, name in part
        ]

    whole = rest(events[:begin])
    for block in copies:
        whole += copied(events[begin:end], block)
    whole += rest(events[end:back])
    for block in reversed(copies):
        whole += copied(events[back:back_end], block)
        if block > copies[0]:
            whole += [("free", numbered(number, block - 1), 0, "") for number in passed]
    # A gradient of the block may be freed after it.
    return whole + rest(events[back_end:])


def _is_in(name: str, path: str) -> bool:
    return f"{name}.".startswith(f"{path}.")
