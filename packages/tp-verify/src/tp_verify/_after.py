"""What is compared after the training: what a model generates, its checkpoint, and what dropout draws."""

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from tp_core.compare import (
    Bound,
    LocalTensor,
    Selections,
    joined_parts,
    norm_of,
    relate,
    relative_error,
    selected,
)

from tp_verify._compare import RunComparison
from tp_verify._dropout_masks import DropoutCall, draw_the_same
from tp_verify._report import Finding
from tp_verify._training_task import Loaded, RunRecord, StepRecord

# How far activations may be apart, as a share of their norm, that are meant to be the same: they are of ranks
# that have trained, in any type.
_NEAR = 0.1
_NEXT_RATES = "the learning rates after loading"
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


def compare_generators(comparison: RunComparison, loaded: Sequence[Mapping[str, str]]) -> Finding | None:
    """Compare the random numbers with which ranks continue with those that they had when they saved."""
    if not loaded:
        return None
    if len(loaded) != len(comparison.ranks):
        comparison.unknown["random numbers"] = "as many ranks have to load as have saved"
        return None
    restored = 0
    for kind in comparison.ranks[0].generators:
        saved = [one.generators[kind] for one in comparison.ranks]
        for rank, one in enumerate(loaded):
            if one[kind] == saved[rank]:
                restored += 1
            elif one[kind] in saved:
                said = f"rank {rank} continues with those of rank {saved.index(one[kind])}"
                return Finding("the loaded random numbers", "", 0, said)
    if restored:
        comparison.count("states of random numbers", restored)
    else:
        comparison.unknown["random numbers"] = "loading restores none"
    return None


def compare_next_rates(comparison: RunComparison, loaded: Sequence[Loaded]) -> Finding | None:
    """Compare the learning rates one step after loading with those of ranks that have trained on."""
    steps = comparison.exact.steps
    if not loaded:
        return None
    if len(loaded) != len(comparison.ranks):
        if steps[0].rates != steps[-1].rates:
            comparison.unknown[_NEXT_RATES] = "as many ranks have to load as have saved"
        return None
    for rank, (saved, one) in enumerate(zip(comparison.ranks, loaded, strict=True)):
        if saved.next_rates and not one.next_rates:
            comparison.unknown[_NEXT_RATES] = "ranks cannot train on with what they have loaded"
            return None
        for name, rate in saved.next_rates.items():
            mine = one.next_rates.get(name, rate)
            if math.isclose(mine, rate, rel_tol=1e-6):  # as of rates before each step
                continue
            if one.makes:
                # Not the strategy's: its checkpoint cannot have a scheduler that it does not know.
                comparison.unknown[_NEXT_RATES] = "the scheduler is hooked into `optimizer`, and made anew"
                return None
            said = f"rank {rank} continues with {mine:.6g} for {name}, without a stop with {rate:.6g}"
            return Finding(_NEXT_RATES, "", 0, said)
    comparison.count(_NEXT_RATES, len(comparison.ranks[0].next_rates))
    return None


def compare_masks(comparison: RunComparison, exact: RunRecord) -> Finding | None:
    """Compare the masks of dropout, call by call.

    Ranks with the same activations draw the same masks, and those with rows, places or features of their own
    draw their own. What a backward pass computes again has the masks of the forward pass.

    Args:
        comparison: The comparison.
        exact: The record of one device, which has drawn, too.
    """
    ranks = comparison.ranks
    for rank, one in enumerate(ranks):
        if one.redrawn:
            said = f"where rank {rank} computes the forward pass again, it draws other masks"
            return Finding("the gradient with dropout", one.redrawn[0], 0, said)
    for call, whole in exact.dropped_from.items():
        parts = [one.dropped_from[call] for one in ranks if call in one.dropped_from]
        if len(parts) == len(ranks) and _is_laid_out(comparison, whole, parts):
            for a, b in itertools.combinations(range(len(ranks)), 2):
                finding = _compare_pair(comparison, call, a, b)
                if finding is not None:
                    return finding
    return None


def _is_laid_out(comparison: RunComparison, whole: torch.Tensor, parts: Sequence[torch.Tensor]) -> bool:
    """Return whether ranks have the whole or parts of it, and no summands, which one mask is right for."""
    shares = [one.shares[0] for one in comparison.ranks if one.shares]
    locals_ = [LocalTensor(part) for part in parts]
    match = relate(whole, locals_, shares, _NEAR * norm_of(whole), reorders=comparison.reorders)
    return match.kind == "same"


def _compare_pair(comparison: RunComparison, call: DropoutCall, a: int, b: int) -> Finding | None:
    one, other = comparison.ranks[a], comparison.ranks[b]
    same = draw_the_same(one.masks, other.masks, call)
    own = _own(one.shares[0], other.shares[0])
    if relative_error(one.dropped_from[call], other.dropped_from[call]) > _NEAR:
        if same:
            said = f"ranks {a} and {b} have their own {own or 'features'}, and the same masks"
            return Finding("dropout", call.module, 0, said)
    elif same is False and not own:
        said = f"ranks {a} and {b} have the same activations, and different masks"
        return Finding("dropout", call.module, 0, said)
    return None


def _own(one: Selections, other: Selections) -> str:
    """Return what of the batch two ranks have otherwise: "rows", or "places" of a sequence; or nothing."""
    pairs = [(one[key], other[key]) for key in one.keys() & other.keys()]
    if any(not _equal(mine.rows, theirs.rows) for mine, theirs in pairs):
        return "rows"
    if any(not _equal(mine.places, theirs.places) for mine, theirs in pairs):
        return "places"
    return ""


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
