"""What is compared after the training: what a model generates, its checkpoint, and what dropout draws."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from tp_core.compare import Bound, Selections, joined_parts, selected

from tp_verify._compare import RunComparison
from tp_verify._report import Finding
from tp_verify._training_task import StepRecord

_DEVIATIONS = 5.0  # how far statistics of as many seeds may be apart: by chance once in a million


def compare_generated(comparison: RunComparison) -> Finding | None:
    """Compare what was generated, which has to be equal, rank by rank."""
    for name, whole in comparison.exact.generated.items():
        near = comparison.near.generated[name]
        if whole.shape != near.shape or not torch.equal(whole, near.to(whole.dtype)):
            comparison.unknown["generation"] = "one device in this type generates others than in float64"
            return None
        comparison.count("generated tensors")
        for rank, one in enumerate(comparison.ranks):
            expected, mine = selected(whole, one.shares[0]), one.generated[name]
            if torch.equal(expected, mine.to(expected.dtype)):
                continue
            said = f"rank {rank} has the shape {tuple(mine.shape)}, not {tuple(expected.shape)}"
            if expected.shape == mine.shape:
                place = tuple((expected != mine).nonzero()[0].tolist())
                said = f"rank {rank} has {mine[place].item()} at {place}, one device {expected[place].item()}"
            return Finding("what is generated", "", 0, said, tensor=name)
    return None


def compare_loaded(comparison: RunComparison, loaded: Sequence[StepRecord]) -> Finding | None:
    """Compare what ranks have loaded with what others had at the end of the training, bit by bit."""
    if not loaded:
        return None
    exact, step = comparison.exact.steps[-1], len(comparison.exact.steps)
    last = [one.steps[-1] for one in comparison.ranks]
    same = replace(comparison, bound=Bound(0.0, 0.0))
    for what, kind in (("weight", "weights"), ("optimizer's state", "states"), ("buffer", "buffers")):
        saved = joined_parts(getattr(exact, kind), [getattr(one, kind) for one in last])
        parts = [getattr(one, kind) for one in loaded]
        finding = same.tensors(f"the loaded {what}", step, saved, saved, parts)
        if finding:
            return finding
    return None


def compare_draws(comparison: RunComparison, draws: Sequence[tuple[float, float]]) -> Finding | None:
    """Compare the distribution of the loss with dropout over seeds.

    All rows are equal. So ranks with rows of their own that draw the same masks have equal losses, and ranks
    with the same rows that draw different ones have not.
    """
    if not draws:
        return None
    ranks, tolerance = comparison.ranks, comparison.bound.rtol
    one = torch.tensor([loss for loss, _ in draws], dtype=torch.float64)
    if len(draws) < 2 or float(one.std()) <= tolerance * float(one.abs().mean()):
        comparison.unknown["dropout"] = "the loss is the same for all seeds"
        return None
    comparison.count("seeds of dropout", len(draws))
    losses = torch.tensor([[loss for loss, _ in r.draws] for r in ranks], dtype=torch.float64)
    weights = torch.tensor([[weight for _, weight in r.draws] for r in ranks], dtype=torch.float64)
    if not bool(weights.any()):  # of a strategy that does not call the step itself
        weights = torch.ones_like(weights)
    known = [rank for rank in range(len(ranks)) if not bool(losses[rank].isnan().any())]
    for a, b in itertools.pairwise(known):
        apart = float((losses[a] - losses[b]).abs().max() / one.abs().mean())
        if _same_share(ranks[a].shares[0], ranks[b].shares[0]):
            if apart > tolerance:
                said = f"ranks {a} and {b} have the same rows, and different masks"
                return Finding("dropout", "", 0, f"{said}: their losses part by {apart:.2g}")
        elif apart <= tolerance:
            return Finding("dropout", "", 0, f"ranks {a} and {b} have their own rows, and the same masks")
    mine = (losses[known] * weights[known]).sum(0) / weights[known].sum(0)
    return _statistics(one, mine)


def _statistics(one: torch.Tensor, mine: torch.Tensor) -> Finding | None:
    count = len(one)
    spread = math.sqrt(float(one.var() + mine.var()) / count)
    if abs(float(one.mean() - mine.mean())) > _DEVIATIONS * spread:
        said = f"its mean over {count} seeds is {mine.mean():.6g}, one device's {one.mean():.6g}"
        return Finding("the loss with dropout", "", 0, said)
    # The variance of a variance, by the fourth moment: losses need not be normal.
    uncertain = sum(
        float(((x - x.mean()) ** 4).mean() - x.var() ** 2) / max(float(x.var()) ** 2, 1e-300) / count
        for x in (one, mine)
    )
    ratio = float(mine.var() / one.var())
    if ratio == 0 or abs(math.log(ratio)) > _DEVIATIONS * math.sqrt(max(uncertain, 4 / count)):
        said = f"its variance over {count} seeds is {ratio:.2g} times one device's"
        return Finding("the loss with dropout", "", 0, said)
    return None


def _same_share(one: Selections, other: Selections) -> bool:
    return one.keys() == other.keys() and all(
        _equal(one[key].rows, other[key].rows) and _equal(one[key].places, other[key].places) for key in one
    )


def _equal(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)
