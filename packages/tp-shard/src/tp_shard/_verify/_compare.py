"""Comparing two runs: whether a split model computes what the whole one does, and where it first does not."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from tp_core.errors import ModelError, TpError

from tp_shard._split import Split
from tp_shard._verify._runs import Run

__all__ = ["Comparison", "Fault", "compare", "compare_ranks", "missed"]

_ROUNDING = 1e-5  # of the largest gradient: what may be nothing but rounding


@dataclass(frozen=True, slots=True)
class Fault:
    """The first thing that differs.

    Attributes:
        module: The name of the module, "" for the model itself.
        what: What of it differs, by how much.
        reason: Why, as far as the numbers show, and what to do.
    """

    module: str
    what: str
    reason: str

    def __str__(self) -> str:
        return f"{self.module or 'the model'}: {self.what}: {self.reason}"


@dataclass(slots=True)
class Comparison:
    """The differences between two runs, each relative to the largest number of its kind.

    Attributes:
        forward: The largest difference of each module's outputs, by its name.
        gradients: That of each parameter's gradient, by its name.
        outputs: That of what the model returned.
        loss: That of the loss.
        fault: The first difference that is more than rounding, ``None`` if there is none.
    """

    forward: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    outputs: float | None = None
    loss: float | None = None
    fault: Fault | None = None


def compare(whole: Run, runs: list[Run], *, tolerance: float) -> Comparison:
    """Compare what the ranks of a split model did with what the whole one did.

    Args:
        whole: The run of the whole model.
        runs: Those of the ranks.
        tolerance: What may differ by rounding, relative to the largest number of its kind.
    """
    comparison = Comparison()
    found = next((f for f in _faults(whole, runs, comparison, tolerance) if f is not None), None)
    comparison.fault = found
    return comparison


def compare_ranks(whole: Run, runs: list[Run], *, tolerance: float) -> Fault | None:
    """Return what ranks of a split model have different numbers of, though all of them hold it.

    Args:
        whole: A run of the whole model without dropout, for the shapes of what is whole.
        runs: Those of the ranks, with dropout.
        tolerance: What may differ by rounding, relative to the largest number of its kind.
    """
    failed = next((run for run in runs if run.error is not None), None)
    if failed is not None:
        return _raised(failed)
    first = runs[0]
    reason = (
        "ranks draw different random numbers for what all of them hold, and would train apart: look for a "
        "ts.nn.ParallelDropout, or a generator or seed of each rank's own, on what is not split"
    )
    shapes = {key: tensor.shape for key, tensor in _numbered(whole.steps)}
    others = [dict(_numbered(run.steps)) for run in runs[1:]]
    for key, mine in _numbered(first.steps):
        alike = [other[key] for other in others if key in other and mine.shape == shapes.get(key)]
        if key[0] not in first.cuts and any(
            _relative_diff(mine, t) > tolerance for t in alike if t.shape == mine.shape
        ):
            return Fault(key[0], "with dropout its outputs differ between ranks", reason)
    for name, value in first.gradients.items():
        same = [run.gradients.get(name) for run in runs[1:]]
        if name not in first.splits and any(
            _gradient_diff(value, other, None, 0, _largest(value)) > tolerance for other in same
        ):
            return Fault(
                name.rpartition(".")[0], f"with dropout the gradient of {name} differs between ranks", reason
            )
    for name, (kept, saved) in first.kept.items():
        found = [run.kept[name][0] for run in runs[1:] if name in run.kept]
        if saved and name not in first.splits and any(_relative_diff(kept, t) > tolerance for t in found):
            return Fault(name.rpartition(".")[0], f"with dropout its {name} differs between ranks", reason)
    return None


def missed(model: nn.Module, whole: Run) -> Iterator[str]:
    """Yield the names of modules that a run did not call, and of parameters whose gradients it did not make.

    Args:
        model: What was run.
        whole: Its run.
    """
    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        names = [start + name for name, p in module._parameters.items() if p is not None]
        idle = [name for name in names if name in whole.gradients and whole.gradients[name] is None]
        if path in whole.called:
            yield from idle
        elif names and not set(whole.gradients) & set(names) - set(idle):
            yield path


def _faults(whole: Run, runs: list[Run], comparison: Comparison, tolerance: float) -> Iterator[Fault | None]:
    forward = _forward(whole, runs, comparison, tolerance)
    failed = next((run for run in runs if run.error is not None), None)
    if failed is not None:
        yield forward  # what went wrong before explains more
        yield _raised(failed)
        return
    yield forward
    yield _outputs(whole, runs, comparison, tolerance)
    yield _gradients(whole, runs, comparison, tolerance)
    yield _inputs(whole, runs, tolerance)
    yield _kept(whole, runs, tolerance)


def _raised(run: Run) -> Fault:
    where = run.entered[-1] if run.entered else ""
    error: BaseException | None = run.error
    if isinstance(error, ModelError) and error.__cause__ is not None:
        error = error.__cause__  # what the split model itself says of it
    text = str(error).strip().splitlines() or [""]
    what = f"{type(error).__name__} in its {run.stage}"
    if isinstance(error, TpError):
        return Fault(where, what, str(error))
    return Fault(
        where,
        what,
        f"{text[0]}; a module around split layers that counts all heads or features by itself "
        "needs ts.Local(...), "
        "which lets it count those of its rank",
    )


def _forward(whole: Run, runs: list[Run], comparison: Comparison, tolerance: float) -> Fault | None:
    numbered = [dict(_numbered(run.steps)) for run in runs]
    given = dict(_numbered(whole.given))
    first: Fault | None = None
    for (name, nth), expected in _numbered(whole.steps):
        for rank, (run, steps) in enumerate(zip(runs, numbered, strict=True)):
            got = steps.get((name, nth))
            if got is None:
                continue
            right = _part(expected, run.cuts.get(name), rank)
            if right.shape != got.shape:
                continue  # what a rank has of the features inside a block is not known from outside
            apart = _relative_diff(right, got)
            comparison.forward[name] = max(comparison.forward.get(name, 0.0), apart)
            if apart > tolerance and first is None:
                reason = "it computes something else on a rank than in one piece"
                if (name, nth) in given:
                    reason = _why_row(
                        given[name, nth], [dict(_numbered(r.given)).get((name, nth)) for r in runs]
                    )
                first = Fault(name, f"outputs differ by {apart:.2g} on rank {rank}", reason)
    return first


def _why_row(whole: Tensor, parts: list[Tensor | None]) -> str:
    """Return why a row layer makes other numbers, by what the ranks gave it."""
    if all(part is not None and part.shape[:-1] == whole.shape[:-1] for part in parts):
        joined = torch.cat([part for part in parts if part is not None], -1)
        if joined.shape == whole.shape:
            if _relative_diff(whole.sort(-1).values, joined.sort(-1).values) < 1e-6:
                return "the features that reach it stand in another order than it is cut"
            return (
                "what reaches it is not each rank's part of what reaches it in one piece: the "
                "layers before it hold "
                "their features in another order than the plan says, or what stands between "
                "mixes features of ranks"
            )
    return "what reaches it is not as wide as what reaches it in one piece"


def _outputs(whole: Run, runs: list[Run], comparison: Comparison, tolerance: float) -> Fault | None:
    worst, where = 0.0, ""
    for name, expected in whole.outputs.items():
        got = [run.outputs.get(name) for run in runs]
        tensors = [tensor for tensor in got if tensor is not None]
        if len(tensors) < len(got):
            return Fault("", f"{name} of its output is missing on a rank", "the ranks take other ways")
        apart = _joined_diff(expected, tensors)
        if apart > worst:
            worst, where = apart, name
    comparison.outputs = worst
    if worst > tolerance:
        return Fault("", f"{where} of its output differs by {worst:.2g}", "and no module inside before it")
    for rank, run in enumerate(runs):
        if whole.loss is not None and run.loss is not None:
            apart = _relative_diff(whole.loss, run.loss)
            comparison.loss = max(comparison.loss or 0.0, apart)
            if apart > tolerance and all(
                r.outputs[n].shape == t.shape for r in runs for n, t in whole.outputs.items()
            ):
                return Fault("", f"the loss differs by {apart:.2g} on rank {rank}", "and its outputs do not")
            if apart > tolerance:
                return Fault(
                    "",
                    f"the loss differs by {apart:.2g} on rank {rank}",
                    "its outputs are split: give a loss that takes them so, such as "
                    "ts.nn.functional.parallel_cross_entropy, or let the head join them with "
                    "gather_output=True",
                )
    return None


def _joined_diff(expected: Tensor, got: list[Tensor]) -> float:
    """Return how far outputs are from the whole one, where each rank may have a part along one dimension."""
    if all(tensor.shape == expected.shape for tensor in got):
        return max(_relative_diff(expected, tensor) for tensor in got)
    if any(tensor.dim() != expected.dim() for tensor in got):
        return float("inf")
    cut = [d for d in range(expected.dim()) if any(t.size(d) != expected.size(d) for t in got)]
    if len(cut) != 1 or sum(t.size(cut[0]) for t in got) != expected.size(cut[0]):
        return float("inf")
    return _relative_diff(expected, torch.cat(got, cut[0]))


def _gradients(whole: Run, runs: list[Run], comparison: Comparison, tolerance: float) -> Fault | None:
    last = {name: i for i, (name, _) in enumerate(whole.steps)}
    scales: dict[str, float] = {}
    for name, gradient in whole.gradients.items():
        owner = name.rpartition(".")[0]
        scales[owner] = max(scales.get(owner, 0.0), _largest(gradient))
    overall = max(scales.values(), default=0.0)
    wrong: list[tuple[int, Fault]] = []
    for name, expected in whole.gradients.items():
        owner = name.rpartition(".")[0]
        # A gradient that is nothing but rounding is measured by its neighbors'.
        scale = max(scales[owner], _ROUNDING * overall)
        shards = [run.gradients.get(name) for run in runs]
        split = runs[0].splits.get(name)
        apart = max(
            _gradient_diff(expected, g, run.splits.get(name), r, scale)
            for r, (g, run) in enumerate(zip(shards, runs, strict=True))
        )
        if expected is not None or any(g is not None for g in shards):
            comparison.gradients[name] = apart
        if apart > tolerance:
            fault = Fault(
                owner, f"the gradient of {name} differs by {apart:.2g}", _why(expected, shards, split, scale)
            )
            wrong.append((last.get(owner, -1), fault))
    return max(wrong, key=lambda item: item[0])[1] if wrong else None


def _gradient_diff(
    expected: Tensor | None, got: Tensor | None, split: Split | None, rank: int, scale: float
) -> float:
    if expected is None or got is None:
        other = got if expected is None else expected
        return 0.0 if other is None or scale == 0 else _largest(other) / scale
    right = expected if split is None else split.take(expected, rank)
    if right.shape != got.shape:
        return float("inf")
    return _relative_diff(right, got, scale)


def _why(expected: Tensor | None, got: list[Tensor | None], split: Split | None, scale: float) -> str:
    ranks = len(got)
    tensors = [g for g in got if g is not None]
    scale = _largest(expected) or scale  # beside larger ones anything would be a multiple of it
    if expected is not None and len(tensors) == ranks and split is None:
        if _relative_diff(expected, torch.stack(tensors).sum(0), scale) < 1e-3:
            return (
                "each rank has the gradient of its own part of the heads or features alone, "
                "and they have to be summed: "
                "give the module ts.Replicated() in the plan"
            )
        if all(_relative_diff(expected * ranks, g, scale) < 1e-3 for g in tensors):
            return (
                f"it is summed over {ranks} ranks that all have the whole of it: leave the module "
                "out of the plan"
            )
        if any(_relative_diff(tensors[0], g, scale) > 1e-3 for g in tensors):
            return "it differs between ranks: part of what it works on is a rank's own"
    if (
        expected is not None
        and split is not None
        and all(
            _relative_diff(split.take(expected, r) * ranks, g, scale) < 1e-3 for r, g in enumerate(tensors)
        )
    ):
        return f"it is {ranks} times too large: what follows is done by all ranks, and its gradient summed"
    return "what follows it goes backward otherwise than in one piece"


def _inputs(whole: Run, runs: list[Run], tolerance: float) -> Fault | None:
    scale = max((_largest(g) for g in whole.inputs.values()), default=0.0)
    # Positions' is nothing but rounding where all values that are attended to are alike.
    scale = max(scale, _ROUNDING * max(map(_largest, whole.gradients.values()), default=0.0))
    for name, expected in whole.inputs.items():
        for rank, run in enumerate(runs):
            apart = _gradient_diff(expected, run.inputs.get(name), None, rank, scale)
            if apart > tolerance:
                reason = "each rank has the gradient of its own part alone, or it is summed too often"
                return Fault(
                    "", f"the gradient of its argument {name} differs by {apart:.2g} on rank {rank}", reason
                )
    return None


def _kept(whole: Run, runs: list[Run], tolerance: float) -> Fault | None:
    for name, (expected, saved) in whole.kept.items():
        for rank, run in enumerate(runs):
            got, split = run.kept.get(name, (expected, saved))[0], run.splits.get(name)
            right = expected if split is None else split.take(expected, rank)
            # Another shape of no state: what a rank keeps of its own heads, such as a bias made once.
            other = float("inf") if saved else 0.0
            apart = _relative_diff(right, got) if right.shape == got.shape else other
            if apart > tolerance:
                owner, _, own = name.rpartition(".")
                return Fault(
                    owner,
                    f"after the run its {own} differs by {apart:.2g} on rank {rank}",
                    "it keeps numbers of what it gets, and gets each rank's part of the features: leave the "
                    "block whole",
                )
    return None


def _numbered(steps: list[tuple[str, Tensor]]) -> Iterator[tuple[tuple[str, int], Tensor]]:
    counts: dict[str, int] = {}
    for name, tensor in steps:
        counts[name] = counts.get(name, -1) + 1
        yield (name, counts[name]), tensor


def _part(whole: Tensor, cut: Split | None, rank: int) -> Tensor:
    if cut is None:
        return whole
    return Split(whole.dim() - 1, cut.size, cut.ranges).take(whole, rank)


def _largest(tensor: Tensor | None) -> float:
    if tensor is None or tensor.numel() == 0:
        return 0.0
    values = tensor.to_dense() if tensor.is_sparse else tensor
    return float(values.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())


def _relative_diff(expected: Tensor, got: Tensor, scale: float | None = None) -> float:
    """Return the largest difference, relative to the largest number; infinities have to be alike."""
    if expected.numel() == 0:
        return 0.0
    a, b = (t.to_dense() if t.is_sparse else t for t in (expected, got))
    if not a.is_floating_point():
        return 0.0 if torch.equal(a, b) else float("inf")
    if not torch.equal(a.isfinite(), b.isfinite()):
        return float("inf")
    a, b = a.double(), b.double()
    difference = float((a - b).nan_to_num(0.0, 0.0, 0.0).abs().max())
    size = max(_largest(a), 1e-12) if scale is None else max(scale, 1e-12)
    return difference / size
