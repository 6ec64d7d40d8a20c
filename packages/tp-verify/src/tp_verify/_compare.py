"""The comparison of the ranks' records with the reference's: the first place where they part."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

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

# -- One step -------------------------------------------------------------------------------------


@dataclass
class RunComparison:
    """The comparison of the ranks' records with those of one device.

    Attributes:
        exact: The reference in float64.
        near: The reference in the type in which the ranks compute.
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
        finding = self.tensors(
            "the weights before the first step",
            0,
            dict(self.exact.initial),
            self.near.initial,
            [r.initial for r in self.ranks],
        )
        if finding:
            return finding
        for number in range(len(self.exact.steps)):
            finding = self._step(number)
            if finding:
                return finding
        for number, exact in self.exact.evaluations.items():
            records = [r.evaluations[number] for r in self.ranks if r.evaluations]
            if not records:
                self.unknown["evaluation"] = "this strategy has none"
                return None
            near = self.near.evaluations[number]
            step = number + 1 if number else 0
            finding = self._forward("evaluation", step, exact, near, records) or self._loss(
                "the loss of the evaluation", step, exact, near, records
            )
            if finding:
                return finding
        return None

    def _step(self, number: int) -> Finding | None:
        exact, near = self.exact.steps[number], self.near.steps[number]
        records = [r.steps[number] for r in self.ranks]
        step = number + 1
        finding = self._forward("forward", step, exact, near, records) or self._loss(
            "the loss", step, exact, near, records
        )
        if finding:
            return finding
        finding = self._gradients(step, exact, near, records)
        if finding:
            return finding
        if exact.norm is not None and near.norm is not None:
            limit = self.bound.limit(torch.tensor(exact.norm), torch.tensor(near.norm), exact.norm)
            for rank, one in enumerate(records):
                if one.norm is None or not abs(one.norm - exact.norm) <= limit:
                    return Finding(
                        "the norm that gradients are clipped by",
                        "",
                        step,
                        f"rank {rank} has {one.norm!s:.8}, one device {exact.norm:.6g}",
                    )
            self.count("norms")
            finding = self.tensors(
                "the clipped gradient", step, exact.clipped, near.clipped, [r.clipped for r in records]
            )
            if finding:
                return finding
        finding = self._updates(step, number, records)
        if finding:
            return finding
        return self.tensors(
            "the optimizer's state", step, exact.states, near.states, [r.states for r in records]
        ) or self.tensors("the buffer", step, exact.buffers, near.buffers, [r.buffers for r in records])

    # -- activations --------------------------------------------------------------------------------

    def _forward(
        self, what: str, step: int, exact: StepRecord, near: StepRecord, records: Sequence[StepRecord]
    ) -> Finding | None:
        matches = []
        for place in exact.forward:
            match = self._match(step, exact, near, records, place)
            if match.kind == "unknown":
                has_other = any(place.module == p.module for r in records for p in r.forward)
                reason = "its outputs have another shape" if has_other else "no rank runs it whole"
                self.unknown.setdefault(place.module or "the model", reason)
                continue
            self.count("outputs of modules")
            if match.kind == "parts":
                around = self._right_around(step, exact, near, records, place)
                if around:
                    self.unknown.setdefault(
                        place.module, f"its outputs differ, and not what {around} makes of them"
                    )
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
        shares, whole = self._shares(step), exact.forward[place].tensor
        rows = [_rows(whole, shares, rank) for rank in range(len(records))]
        locals_ = [
            merged(r.forward, self._calls(exact.forward, r.forward, place), n)
            for r, n in zip(records, rows, strict=True)
        ]
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
        path = place.module.rpartition(".")[0]
        while path:
            outputs = [p for p in exact.forward if p.module == path]
            if outputs and all(self._match(step, exact, near, records, p).kind == "same" for p in outputs):
                return path
            path = path.rpartition(".")[0]
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
        if losses and (
            abs(mean - exact.loss) <= limit or all(abs(loss - exact.loss) <= limit for loss in losses)
        ):
            return None
        said = ", ".join(f"{loss:.6g}" for loss in losses)
        return Finding(
            what, "", step, f"ranks have {said}, {mean:.6g} in the mean; one device {exact.loss:.6g}"
        )

    # -- gradients ----------------------------------------------------------------------------------

    def _gradients(
        self, step: int, exact: StepRecord, near: StepRecord, records: Sequence[StepRecord]
    ) -> Finding | None:
        mine = [r.gradients for r in records]
        wrong = self._wrong(exact.gradients, near.gradients, mine)
        self.count("gradients", len(exact.gradients))
        if not wrong:
            return None
        ratios = {name: ratio for name, (_, ratio) in wrong.items()}
        scale = max((norm_of(g) for g in exact.gradients.values() if g is not None), default=0.0)
        # One that is all but zero is right by any factor.
        weighty = {n for n, g in exact.gradients.items() if g is not None and norm_of(g) > 1e-6 * scale}
        if len(wrong) > 1 and weighty <= wrong.keys():
            first = next(iter(ratios.values()))
            if first and all(r and abs(r - first) < 1e-3 * abs(first) for r in ratios.values()):
                return Finding(
                    "the gradient",
                    "",
                    step,
                    f"every one is {first:.6g} times one device's: the loss is scaled otherwise",
                )
        place = self._first_backward(step, exact, near, records)
        order = [p.module for p in exact.forward]
        last = max(wrong, key=lambda name: _position(order, name))
        said = wrong[last][0]
        if place is not None and _position(order, place[0].module) >= _position(order, last):
            where, match = place
            also = f"; so do the gradients of {len(wrong)} parameters, {last} among them"
            if len(wrong) == 1:
                also = f"; so does the gradient of {last}"
            return Finding("the gradient of the input", where.module, step, f"{_said(match)}{also}")
        module, _, parameter = last.rpartition(".")
        return Finding("the gradient", module, step, said, tensor=parameter)

    def _wrong(
        self,
        exact: Mapping[str, Tensor | None],
        near: Mapping[str, Tensor | None],
        ranks: Sequence[Mapping[str, Any]],
    ) -> dict[str, tuple[str, float]]:
        """Return the parameters with another gradient: how it differs, and its ratio to the right one."""
        scale = max((norm_of(g) for g in exact.values() if g is not None), default=0.0)
        wrong = {}
        for name, whole in exact.items():
            grads = {rank: one[name] for rank, one in enumerate(ranks) if name in one}
            if whole is None or any(grad is None for grad in grads.values()):
                has_grad = [grad is not None and bool(grad.any()) for grad in grads.values()]
                if whole is None and any(has_grad):
                    wrong[name] = ("it has a gradient, and on one device it has none", 0.0)
                elif whole is not None and norm_of(whole) > self.bound.atol * scale and not all(has_grad):
                    wrong[name] = (f"{has_grad.count(False)} of {len(has_grad)} ranks have no gradient", 0.0)
                continue
            if not grads:
                self.unknown.setdefault(name, "no rank has it")
                continue
            said = self._difference(whole, near.get(name), grads, scale)
            if said:
                ratio = _ratio(next(iter(grads.values())).double(), whole)
                wrong[name] = (said, ratio)
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
            keys = [[(p, side) for p in self._calls(exact.forward, r.forward, place)] for r in records]
            rows = [_rows(whole.tensor, shares, rank) for rank in range(len(records))]
            locals_ = [merged(r.backward, k, n) for r, k, n in zip(records, keys, rows, strict=True)]
            if scales is None:  # of each rank's loss: known at the first gradient there is
                scales = self._scales(whole.tensor, locals_, shares)
                if scales is None:
                    continue
            even: list[LocalTensor | None] = []
            for one, factor in zip(locals_, scales, strict=True):
                scaled = None
                if one is not None:
                    scaled = LocalTensor(one.tensor.double() / factor, one.layout)
                even.append(scaled)
            match = self._relate(whole.tensor, near.backward.get((place, side)), even, shares)
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
        return parts[0] if parts else first

    def _scales(
        self, whole: Tensor, locals_: Sequence[LocalTensor | None], shares: Sequence[Selections]
    ) -> list[float] | None:
        """Return how much larger each rank's gradients are than one device's, by those at its output."""
        scales = []
        for rank, one in enumerate(locals_):
            if one is None or (one.layout and any(k != "same" for k, *_ in one.layout)):
                return None
            expected = selected(whole, shares[rank]) if rank < len(shares) else whole
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
                said = "no rank has it"
            else:
                said = self._difference(whole.double(), near.get(name), parts, scale)
            self.count(what.removeprefix("the "))
            if said:
                module, _, tensor = parameter.rpartition(".")
                return Finding(what, module, step, said, tensor=f"{tensor} {key}".rstrip())
        return None

    def _updates(self, step: int, number: int, records: Sequence[StepRecord]) -> Finding | None:
        """Compare what the steps so far have changed: a small step would drown in the weight itself."""
        exact, near = self.exact, self.near
        changed = {n: t - exact.initial[n] for n, t in exact.steps[number].weights.items()}
        changed_near = {
            n: t.double() - near.initial[n].double() for n, t in near.steps[number].weights.items()
        }
        ranks = [
            {n: t.double() - r.initial[n].double() for n, t in one.weights.items() if n in r.initial}
            for r, one in zip(self.ranks, records, strict=True)
        ]
        return self.tensors("the change of the weight", step, changed, changed_near, ranks)

    def count(self, kind: str, by: int = 1) -> None:
        """Count what was compared."""
        self.compared[kind] = self.compared.get(kind, 0) + by


def _rows(whole: Tensor, shares: Sequence[Selections], rank: int) -> int:
    expected = selected(whole, shares[rank]) if rank < len(shares) else whole
    return expected.size(0) if expected.dim() else 1


def _position(order: Sequence[str], name: str) -> int:
    """Return when the module of a parameter ran last."""
    path = name
    while path:
        if path in order:
            return len(order) - order[::-1].index(path)
        path = path.rpartition(".")[0]
    return len(order) if "" in order else 0


def _ratio(local: Tensor, whole: Tensor) -> float:
    """Return the number that one tensor is times another; 0 where it is none."""
    if local.shape != whole.shape or not norm_of(whole):
        return 0.0
    ratio = float((local * whole).sum() / (whole * whole).sum())
    return ratio if relative_error(local, ratio * whole) < 1e-2 else 0.0


def _said(match: Match) -> str:
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
    what = "the output" if what == "forward" else "the output in evaluation"
    return Finding(what, place.module, step, _said(match), tensor=place.tensor)
