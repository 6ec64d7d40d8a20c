"""The comparison of the ranks' records with the reference's: the first place where they part."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tp_core.compare import (
    Bound,
    LocalTensor,
    Match,
    Selections,
    TensorPlace,
    difference_on_ranks,
    merged,
    norm_of,
    relate,
    relative_error,
    selected,
)

from tp_verify._report import Finding
from tp_verify._training_task import RunRecord, StepRecord

_ROUNDED = torch.finfo(torch.float32).eps
"""How far from 1 a factor may be that was computed in float32."""

# -- One step -------------------------------------------------------------------------------------


@dataclass
class RunComparison:
    """The comparison of the ranks' records with those of one device.

    Attributes:
        exact: The reference in float64.
        near: The reference in the type in which the ranks compute, farthest from the exact one.
        ranks: The records of all ranks.
        bound: What rounding explains.
        compared: How many tensors of each kind were compared.
        unknown: Places that could not be compared, with the reason.
        reorders: Whether parts along a dimension may be in any order.
    """

    exact: RunRecord
    near: RunRecord
    ranks: Sequence[RunRecord]
    bound: Bound
    compared: dict[str, int]
    unknown: dict[str, str]
    reorders: bool = False

    def first(self) -> Finding | None:
        """Return the first place where the ranks part from one device."""
        return next((finding for finding in self._findings() if finding is not None), None)

    def _findings(self) -> Iterator[Finding | None]:
        """Compare in the order of the run, and yield a finding or ``None`` for each kind of number.

        It is read up to the first finding: all that follows would differ because of it.
        """
        yield self.tensors(
            "the weights before the first step",
            0,
            dict(self.exact.initial),
            self.near.initial,
            [r.initial for r in self.ranks],
        )
        for number, record in enumerate(self.exact.steps):
            if record.loss is not None and not math.isfinite(record.loss):
                # Weights of a type with few digits: one device in this type has the same, or the step before
                # would have been found.
                reason = f"the loss is {record.loss}, on one device, too"
                self.unknown[f"step {number + 1} and what follows"] = reason
                return
            yield from self._step_findings(number)
        for number, exact in self.exact.evaluations.items():
            records = [r.evaluations[number] for r in self.ranks if r.evaluations]
            if not records:
                self.unknown["evaluation"] = "this strategy has none"
                return
            near = self.near.evaluations[number]
            step = number + 1 if number else 0
            yield self._forward("evaluation", step, exact, near, records)
            yield self._loss("the loss of the evaluation", step, exact, near, records)

    def _step_findings(self, number: int) -> Iterator[Finding | None]:
        exact = self.exact.steps[number]
        near = self.near.steps[number]
        records = [r.steps[number] for r in self.ranks]
        step = number + 1
        yield self._forward("forward", step, exact, near, records)
        yield self._loss("the loss", step, exact, near, records)
        yield self._gradients(step, exact, near, records)
        if exact.norm is not None and near.norm is not None:
            yield self._norm(step, exact.norm, near.norm, records)
            clipped = [r.clipped for r in records]
            yield self.tensors("the clipped gradient", step, exact.clipped, near.clipped, clipped)
        yield self._rates(step, exact, records)
        yield self._updates(step, number, records)
        states = [r.states for r in records]
        yield self.tensors("the optimizer's state", step, exact.states, near.states, states)
        buffers = [r.buffers for r in records]
        yield self.tensors("the buffer", step, exact.buffers, near.buffers, buffers)

    def _norm(self, step: int, exact: float, near: float, records: Sequence[StepRecord]) -> Finding | None:
        limit = self.bound.limit(torch.tensor(exact), torch.tensor(near), exact)
        for rank, record in enumerate(records):
            if record.norm is None or not abs(record.norm - exact) <= limit:
                difference = f"rank {rank} has {record.norm!s:.8}, one device {exact:.6g}"
                return Finding("the norm that gradients are clipped by", "", step, difference)
        self.count("norms")
        return None

    # -- activations --------------------------------------------------------------------------------

    def _forward(
        self, what: str, step: int, exact: StepRecord, near: StepRecord, records: Sequence[StepRecord]
    ) -> Finding | None:
        matches = []
        for place in exact.forward:
            match = self._match(step, exact, near, records, place)
            if match.kind == "unknown":
                has_other = any(place.module == p.module for r in records for p in r.forward)
                if has_other:
                    reason = "its outputs have another shape"
                else:
                    reason = "no rank runs it whole"
                self.unknown.setdefault(place.module or "the model", reason)
                continue
            self.count("outputs of modules")
            if match.kind == "parts":
                around = self._right_around(step, exact, near, records, place)
                if around:
                    reason = f"its outputs differ, and not what {around} makes of them"
                    self.unknown.setdefault(place.module, reason)
                    continue
            matches.append((place, match))
            if match.kind == "parts":
                return _blame(what, step, matches)
        if matches and matches[-1][1].kind == "partial":
            return _blame(what, step, matches)
        return None

    def _match(
        self,
        step: int,
        exact: StepRecord,
        near: StepRecord,
        records: Sequence[StepRecord],
        place: TensorPlace,
    ) -> Match:
        shares = self._shares(step)
        whole = exact.forward[place].tensor
        locals_ = []
        for rank, record in enumerate(records):
            calls = self._calls(exact.forward, record.forward, place)
            locals_.append(merged(record.forward, calls, _rows(whole, shares, rank)))
        return self._relate(whole, near.forward.get(place), locals_, shares)

    def _right_around(
        self,
        step: int,
        exact: StepRecord,
        near: StepRecord,
        records: Sequence[StepRecord],
        place: TensorPlace,
    ) -> str:
        """Return a module around the place that has the right outputs, however it computes them."""
        path = place.module
        while path:
            path = path.rpartition(".")[0]
            outputs = [p for p in exact.forward if p.module == path]
            if outputs and all(self._match(step, exact, near, records, p).kind == "same" for p in outputs):
                return path or "the model"
        return ""

    def _calls(
        self, exact: Mapping[Any, Any], mine: Mapping[Any, Any], place: TensorPlace
    ) -> list[TensorPlace]:
        """Return the places of one call of the reference on a rank, one for each micro-batch."""
        per_batch = 1 + max(p.call for p in exact if p.module == place.module)
        most = 1 + max((p.call for p in mine if p.module == place.module), default=-1)
        return [place._replace(call=n) for n in range(place.call, most, per_batch)]

    def _relate(
        self,
        exact: Tensor,
        near: LocalTensor | None,
        locals_: Sequence[LocalTensor | None],
        shares: Sequence[Selections],
    ) -> Match:
        scale = norm_of(exact)
        nudged = None if near is None else near.tensor
        limit = self.bound.limit(exact, nudged, scale)
        return relate(exact, locals_, shares, limit, reorders=self.reorders)

    def _whole_shares(self, step: int) -> bool:
        """Return whether each rank has the whole batch."""
        shares = self._shares(step)
        return bool(shares) and all(
            len(one.rows) == one.shape[0] and (one.places is None or len(one.places) == one.shape[1])
            for share in shares
            for one in share.values()
        )

    def _shares(self, step: int) -> list[Selections]:
        return [r.shares[max(0, step - 1)] for r in self.ranks if r.shares]

    def _loss(
        self, what: str, step: int, exact: StepRecord, near: StepRecord, records: Sequence[StepRecord]
    ) -> Finding | None:
        if exact.loss is None or near.loss is None:
            return None
        limit = self.bound.limit(torch.tensor(exact.loss), torch.tensor(near.loss), abs(exact.loss))
        known = [(r.loss, r.weight) for r in records if r.loss is not None and not math.isnan(r.loss)]
        losses = [loss for loss, _ in known]
        # A strategy that does not call the step itself has no weights; then ranks count equally.
        total = sum(weight for _, weight in known)
        if total:
            mean = sum(loss * weight / total for loss, weight in known)
        else:
            mean = sum(loss / len(known) for loss in losses)
        self.count("losses")
        # Each rank has the loss of its share, or all have that of the whole batch. So ranks with the same
        # share have the same loss.
        errors = [abs(loss - exact.loss) for loss in losses]
        if losses and all(error <= limit for error in errors):
            return None
        if losses and abs(mean - exact.loss) <= limit and not self._whole_shares(step):
            return None
        listed = ", ".join(f"{loss:.6g}" for loss in losses)
        difference = f"ranks have {listed}, {mean:.6g} in the mean; one device {exact.loss:.6g}"
        return Finding(what, "", step, difference)

    # -- gradients ----------------------------------------------------------------------------------

    def _gradients(
        self, step: int, exact: StepRecord, near: StepRecord, records: Sequence[StepRecord]
    ) -> Finding | None:
        wrong = self._wrong(exact.gradients, near.gradients, [r.gradients for r in records])
        self.count("gradients", len(exact.gradients))
        if not wrong:
            return None
        factor, digits = _common_factor(exact.gradients, wrong)
        if factor:
            if abs(factor - 1) <= _ROUNDED:
                # Shares of tokens, one integer tensor divided by another, are float32.
                self.bound = replace(self.bound, rtol=self.bound.rtol + 2 * abs(factor - 1))
                self.unknown["the scale of the loss"] = "float32 on ranks; what is smaller is not seen"
                return None
            difference = f"every one is {factor:.{digits}g} times one device's: the loss is scaled otherwise"
            return Finding("the gradient", "", step, difference)
        # Backward meets the last module first: what is wrong there explains the rest.
        order = [p.module for p in exact.forward]
        last = max(wrong, key=lambda name: _position(order, name))
        first_input = self._first_backward(step, exact, near, records)
        if first_input is not None:
            place, match = first_input
            if _position(order, place.module) >= _position(order, last):
                also = f"; so do the gradients of {len(wrong)} parameters, {last} among them"
                if len(wrong) == 1:
                    also = f"; so does the gradient of {last}"
                difference = f"{_match_in_words(match)}{also}"
                return Finding("the gradient of the input", place.module, step, difference)
        module, _, parameter = last.rpartition(".")
        return Finding("the gradient", module, step, wrong[last].difference, tensor=parameter)

    def _wrong(
        self,
        exact: Mapping[str, Tensor | None],
        near: Mapping[str, Tensor | None],
        ranks: Sequence[Mapping[str, Any]],
    ) -> dict[str, "_WrongGradient"]:
        """Return the parameters with another gradient."""
        scale = max((norm_of(g) for g in exact.values() if g is not None), default=0.0)
        wrong = {}
        for name, whole in exact.items():
            grads = {rank: one[name] for rank, one in enumerate(ranks) if name in one}
            if whole is None or any(grad is None for grad in grads.values()):
                has_grad = [grad is not None and bool(grad.any()) for grad in grads.values()]
                if whole is None and any(has_grad):
                    wrong[name] = _WrongGradient("it has a gradient, and on one device it has none")
                elif whole is not None and norm_of(whole) > self.bound.atol * scale and not all(has_grad):
                    without = f"{has_grad.count(False)} of {len(has_grad)} ranks have no gradient"
                    wrong[name] = _WrongGradient(without)
                continue
            if not grads:
                self.unknown.setdefault(name, "no rank has it")
                continue
            difference = self._difference(whole, near.get(name), grads, scale)
            if difference:
                rounding = self.bound.limit(whole, near.get(name), scale) / max(norm_of(whole), 1e-300)
                ratio = _ratio(next(iter(grads.values())).double(), whole, rounding)
                wrong[name] = _WrongGradient(difference, ratio, rounding)
        return wrong

    def _difference(
        self, whole: Tensor, near: Tensor | None, parts: Mapping[int, Tensor], scale: float
    ) -> str:
        """Return in words how ranks differ from the whole; empty where they do not."""
        return difference_on_ranks(whole, parts, self.bound.limit(whole, near, scale))

    def _first_backward(
        self, step: int, exact: StepRecord, near: StepRecord, records: Sequence[StepRecord]
    ) -> tuple[TensorPlace, Match] | None:
        """Return the first input of a module, in the order of backward, from which all gradients part."""
        shares = self._shares(step)
        scales = None
        matches: list[tuple[TensorPlace, str, Match]] = []
        for (place, side), whole in exact.backward.items():
            locals_ = []
            for rank, record in enumerate(records):
                calls = [(p, side) for p in self._calls(exact.forward, record.forward, place)]
                locals_.append(merged(record.backward, calls, _rows(whole.tensor, shares, rank)))
            if scales is None:  # of each rank's loss: known at the first gradient there is
                scales = self._scales(whole.tensor, locals_, shares)
                if scales is None:
                    continue
            scaled: list[LocalTensor | None] = []
            for one, factor in zip(locals_, scales, strict=True):
                if one is not None:
                    one = LocalTensor(one.tensor.double() / factor, one.layout)  # noqa: PLW2901 - scaled
                scaled.append(one)
            match = self._relate(whole.tensor, near.backward.get((place, side)), scaled, shares)
            if match.kind != "unknown":
                matches.append((place, side, match))
        suffix = len(matches)
        while suffix and matches[suffix - 1][2].kind != "same":
            suffix -= 1
        first = next(((p, match) for p, side, match in matches[suffix:] if side == "input"), None)
        if first is None or matches[suffix][1] != "input":
            return None
        # Others of its parts have had their gradients since, and were right.
        inside = f"{first[0].module}."
        parts = [
            (p, match)
            for p, side, match in matches[:suffix]
            if side == "input" and match.kind != "same" and p.module.startswith(inside)
        ]
        if parts:
            return parts[0]
        return first

    def _scales(
        self, whole: Tensor, locals_: Sequence[LocalTensor | None], shares: Sequence[Selections]
    ) -> list[float] | None:
        """Return how much larger each rank's gradients are than one device's, by those at its output."""
        scales = []
        for rank, one in enumerate(locals_):
            if one is None or (one.layout and any(k != "same" for k, *_ in one.layout)):
                return None
            if rank < len(shares):
                expected = selected(whole, shares[rank])
            else:
                expected = whole
            if expected.shape != one.tensor.shape or not norm_of(expected):
                return None
            scales.append(norm_of(one.tensor) / norm_of(expected) or 1.0)
        return scales

    # -- parameters, states, buffers ----------------------------------------------------------------

    def tensors(
        self,
        what: str,
        step: int,
        exact: Mapping[str, Tensor | None],
        near: Mapping[str, Tensor | None],
        ranks: Sequence[Mapping[str, Any]],
    ) -> Finding | None:
        """Compare parameters, or what belongs to them, by name; return the first that parts."""
        scale = max((norm_of(t) for t in exact.values() if t is not None), default=0.0)
        for name, whole in exact.items():
            parts = {rank: one[name] for rank, one in enumerate(ranks) if one.get(name) is not None}
            if whole is None:
                continue
            parameter, _, key = name.partition(":")
            if not parts:
                if what.startswith("the weights") or parameter in self.unknown:
                    self.unknown.setdefault(parameter, "no rank has it")
                    continue
                difference = "no rank has it"
            else:
                difference = self._difference(whole.double(), near.get(name), parts, scale)
            self.count(what.removeprefix("the "))
            if difference:
                module, _, tensor = parameter.rpartition(".")
                return Finding(what, module, step, difference, tensor=f"{tensor} {key}".rstrip())
        return None

    def _rates(self, step: int, exact: StepRecord, records: Sequence[StepRecord]) -> Finding | None:
        """Compare learning rates: in a type of few digits, changes of weights are too coarse to show them."""
        for name, rate in exact.rates.items():
            for rank, record in enumerate(records):
                own = record.rates.get(name, rate)
                # A scheduler may multiply rates one by one, or keep them in float32.
                if not math.isclose(own, rate, rel_tol=1e-6):
                    module, _, parameter = name.rpartition(".")
                    difference = f"the learning rate of rank {rank} is {own:.6g}, one device's {rate:.6g}"
                    return Finding("the change of the weight", module, step, difference, tensor=parameter)
        if exact.rates:
            self.count("learning rates", len(exact.rates))
        return None

    def _updates(self, step: int, number: int, records: Sequence[StepRecord]) -> Finding | None:
        """Compare what the step has changed: it would drown in the weight itself."""
        ranks = []
        for run, record in zip(self.ranks, records, strict=True):
            ranks.append(_changes(record.weights, _before(run, number)))
        exact = _changes(self.exact.steps[number].weights, _before(self.exact, number))
        near = _changes(self.near.steps[number].weights, _before(self.near, number))
        return self.tensors("the change of the weight", step, exact, near, ranks)

    def count(self, kind: str, by: int = 1) -> None:
        """Count what was compared."""
        self.compared[kind] = self.compared.get(kind, 0) + by


def _before(run: RunRecord, number: int) -> Mapping[str, Tensor]:
    """Return the weights before a step: of a reference that follows ranks, theirs."""
    if run.steps[number].before:
        return run.steps[number].before
    if number:
        return run.steps[number - 1].weights
    return run.initial


def _changes(weights: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return what a step has changed; a rank may have had none of some weights."""
    changes = {}
    for name, weight in weights.items():
        if name in before:
            changes[name] = weight.double() - before[name].double()
    return changes


class _WrongGradient(NamedTuple):
    """How a gradient differs, its ratio to the right one, if it has one, and what rounding is of its norm."""

    difference: str
    ratio: float = 0.0
    rounding: float = 0.0


def _common_factor(
    exact: Mapping[str, Tensor | None], wrong: Mapping[str, _WrongGradient]
) -> tuple[float, int]:
    """Return the factor by which all gradients are wrong, 0 where there is none, and its known digits."""
    scale = max((norm_of(g) for g in exact.values() if g is not None), default=0.0)
    # One that is all but zero is right by any factor.
    weighty = {n for n, g in exact.items() if g is not None and norm_of(g) > 1e-6 * scale}
    if len(wrong) < 2 or not weighty <= wrong.keys():
        return 0.0, 0
    first = next(iter(wrong.values())).ratio
    if not first:
        return 0.0, 0
    coarsest = 0.0
    for one in wrong.values():
        apart = abs(one.ratio / first - 1)
        if not one.ratio or apart >= max(1e-3, one.rounding):
            return 0.0, 0
        coarsest = max(coarsest, one.rounding)
    if coarsest < 1e-6:
        digits = 6
    else:
        digits = max(2, math.floor(-math.log10(coarsest)))
    return first, digits


def _rows(whole: Tensor, shares: Sequence[Selections], rank: int) -> int:
    """Return the rows of a rank's share of a tensor."""
    if rank < len(shares):
        whole = selected(whole, shares[rank])
    if whole.dim():
        return whole.size(0)
    return 1


def _position(order: Sequence[str], name: str) -> int:
    """Return when the module of a parameter ran last."""
    path = name
    while path:
        if path in order:
            return len(order) - order[::-1].index(path)
        path = path.rpartition(".")[0]
    if "" in order:
        return len(order)
    return 0


def _ratio(local: Tensor, whole: Tensor, rounding: float) -> float:
    """Return the number that one tensor is times another, up to a share by rounding; 0 where it is none."""
    if local.shape != whole.shape or not norm_of(whole):
        return 0.0
    ratio = float((local * whole).sum() / (whole * whole).sum())
    # It explains the difference: what is left beside it is a tenth of it, and no rounding of another kind.
    left = relative_error(local, ratio * whole)
    if left < min(max(1e-2, rounding), 0.1 * abs(ratio - 1)):
        return ratio
    return 0.0


def _match_in_words(match: Match) -> str:
    if match.kind == "partial":
        return "the ranks' parts sum to it, and were not summed"
    return f"it differs by {match.error:.2g} of its norm{match.where}"


def _blame(what: str, step: int, matches: Sequence[tuple[TensorPlace, Match]]) -> Finding:
    """Return a finding for the last match, or for what was left as summands just before it.

    A router's scores are summands by design, the second of its outputs.
    """
    at = len(matches) - 1
    while at and matches[at - 1][1].kind == "partial" and matches[at - 1][0].tensor in ("", "0"):
        at -= 1
    place, match = matches[at]
    if what == "forward":
        what = "the output"
    else:
        what = "the output in evaluation"
    return Finding(what, place.module, step, _match_in_words(match), tensor=place.tensor)
