"""The bounds of a model: how far it grows a rounding, by several runs, and what the ranks' own sums round."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from tp_core.compare import Bound, LocalTensor, coarsest, distance

from tp_verify._training_task import OneDevice, RunRecord, StepRecord, TrainingTask, run_task

_Key = TypeVar("_Key")

NUDGES = 3
"""How many runs have one rounding more after each module. In a single run a loss may be right by chance, and
its bound would be too small; in several it hardly is."""


def rounded_runs(task: TrainingTask, kept: torch.dtype, computed: torch.dtype) -> Iterator[RunRecord]:
    """Yield the records of one device with roundings, run by run.

    Args:
        task: What it trains, on the ranks' weights.
        kept: The type of the weights.
        computed: The coarsest type in which it computes.
    """
    if kept != torch.float64:  # else roundings within the model are those of the exact run
        yield run_task(task, OneDevice())
    for seed in range(NUDGES):
        yield run_task(replace(task, nudge=computed, nudge_seed=seed), OneDevice())


def bound_of_sums(dtypes: Sequence[torch.dtype], terms: int) -> Bound:
    """Return the bound of what ranks round that one device does not, whatever the model grows of it.

    Where a type has few digits, this is no constant. A gradient that is summed over micro-batches and ranks
    is rounded at each term, and where it is scaled; each time by half a unit of the last place at most. Such
    roundings are independent: their norms add up as squares do.

    Args:
        dtypes: All types in which either side computes.
        terms: How many micro-batches all ranks have together.
    """
    bound = Bound.of(dtypes)
    digits = torch.finfo(coarsest(dtypes))
    if digits.bits > 16:
        return bound
    return Bound(math.sqrt(terms + 1) * digits.eps / 2, bound.atol)


def farthest(exact: RunRecord, runs: Iterable[RunRecord]) -> RunRecord:
    """Return a record that has each number as it is in the run in which it is farthest from the exact one.

    Runs are made one by one, so that two of them are in memory.
    """
    made = iter(runs)
    far = next(made)
    for run in made:
        steps = [_farther_step(*three) for three in zip(exact.steps, far.steps, run.steps, strict=True)]
        evaluations = {
            number: _farther_step(one, far.evaluations[number], run.evaluations[number])
            for number, one in exact.evaluations.items()
        }
        far = replace(far, steps=steps, evaluations=evaluations, dtypes=far.dtypes | run.dtypes)
    return far


def _farther_step(exact: StepRecord, one: StepRecord, other: StepRecord) -> StepRecord:
    return replace(
        one,
        forward=_farther(exact.forward, one.forward, other.forward),
        backward=_farther(exact.backward, one.backward, other.backward),
        loss=_farther_number(exact.loss, one.loss, other.loss),
        gradients=_farther(exact.gradients, one.gradients, other.gradients),
        norm=_farther_number(exact.norm, one.norm, other.norm),
        clipped=_farther(exact.clipped, one.clipped, other.clipped),
        weights=_farther(exact.weights, one.weights, other.weights),
        states=_farther(exact.states, one.states, other.states),
        buffers=_farther(exact.buffers, one.buffers, other.buffers),
    )


def _farther(
    exact: Mapping[_Key, Any], one: Mapping[_Key, Any], other: Mapping[_Key, Any]
) -> dict[_Key, Any]:
    """Return of two tensors with one name the one that is farther from the exact one."""
    far = dict(one)
    for name, tensor in other.items():
        known = _tensor(one.get(name))
        right = _tensor(exact.get(name))
        new = _tensor(tensor)
        # A model may branch on its numbers: what one device has in float64 alone, nothing is compared with.
        if known is None or right is None or new is None or new.shape != right.shape:
            continue
        # One that overflows would hide whatever ranks have there.
        if distance(right, known) < distance(right, new) < math.inf:
            far[name] = tensor
    return far


def _tensor(value: torch.Tensor | LocalTensor | None) -> torch.Tensor | None:
    if isinstance(value, LocalTensor):
        return value.tensor
    return value


def _farther_number(exact: float | None, one: float | None, other: float | None) -> float | None:
    if exact is None or one is None or other is None:
        return one
    if abs(one - exact) < abs(other - exact) < math.inf:
        return other
    return one
