"""The verification of a plan: the first difference between the split model and the whole one, if any."""

import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core.compare import ForwardLines, idle_lines_in_words
from tp_core.errors import ConfigError, ModelError, TpError
from tp_core.internal import check_not_quantized, free_nbytes, is_dtensor

from tp_shard._groups._group import GroupLike, as_group
from tp_shard._plans._maker import choose
from tp_shard._plans._parallelize import words
from tp_shard._plans._styles import Plan
from tp_shard._shards import ParallelLayer
from tp_shard._split import Split
from tp_shard._verify._examples import Call, Loss, bytes_needed, cast, other_calls, probe_copy
from tp_shard._verify._simulate import (
    Run,
    Updates,
    rows_of,
    run_split,
    run_whole,
    run_whole_or_detached,
    takes,
)
from tp_shard.errors import VerificationError

_STEPS = 3  # optimizer steps on the batch of its own
_ROUNDING = 1e-5  # relative to the largest gradient: gradients below it may be rounding alone


@dataclass(frozen=True, slots=True)
class Fault:
    """The first difference.

    Attributes:
        module: The name of the module, "" for the model itself.
        what: The number that differs, and by how much.
        reason: The reason, as far as the numbers show it, and the remedy.
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
        gradients: The largest difference of each parameter's gradient, by its name.
        fault: The first difference beyond rounding, ``None`` if there is none.
    """

    forward: dict[str, float] = field(default_factory=dict)
    gradients: dict[str, float] = field(default_factory=dict)
    outputs: float | None = None
    loss: float | None = None
    fault: Fault | None = None


def compare(whole: Run, runs: list[Run], *, tolerance: float) -> Comparison:
    comparison = Comparison()
    found = next((f for f in _faults(whole, runs, comparison, tolerance) if f is not None), None)
    comparison.fault = found
    return comparison


def compare_ranks(whole: Run, runs: list[Run], *, tolerance: float) -> Fault | None:
    """Return the first whole tensor that differs between runs with dropout; ``whole`` is one without."""
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
    """Yield the names of modules that a run did not call, and of parameters without a gradient from it."""
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
        yield forward  # a difference before the error explains more
        yield _raised(failed)
        return
    yield forward
    yield _outputs(whole, runs, comparison, tolerance)
    yield _gradients(whole, runs, comparison, tolerance)
    yield _inputs(whole, runs, tolerance)
    yield _tensor_fault(whole, runs, tolerance)


def _raised(run: Run) -> Fault:
    where = run.entered[-1] if run.entered else ""
    error: BaseException | None = run.error
    if isinstance(error, ModelError) and error.__cause__ is not None:
        error = error.__cause__  # the error inside the one of `guard_forward`
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
                continue  # the rank's part of the features inside a block is not known from outside
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
    """Return the reason why a row layer's output differs, from its inputs on the ranks."""
    if all(part is not None and part.shape[:-1] == whole.shape[:-1] for part in parts):
        joined = torch.cat([part for part in parts if part is not None], -1)
        if joined.shape == whole.shape:
            if _relative_diff(whole.sort(-1).values, joined.sort(-1).values) < 1e-6:
                return "the features that reach it stand in another order than it is cut"
            return (
                "what reaches it is not each rank's part of what reaches it in one piece: the layers before "
                "it hold their features in another order than the plan says, or what stands between mixes "
                "features of ranks"
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
    """Return the difference of outputs from the whole one; each rank may have a part along one dimension."""
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
        # A gradient that is rounding alone is measured relative to the others.
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
    scale = _largest(expected) or scale  # by its own scale: on a larger one any multiple would match
    if expected is not None and len(tensors) == ranks and split is None:
        if _relative_diff(expected, torch.stack(tensors).sum(0), scale) < 1e-3:
            return (
                "each rank has the gradient of its own part of the heads or features alone, and they have to "
                "be summed: give the module ts.Replicated() in the plan"
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
    # The gradient of positions is rounding alone if all values that they attend to are equal.
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


def _tensor_fault(whole: Run, runs: list[Run], tolerance: float) -> Fault | None:
    for name, (expected, saved) in whole.kept.items():
        for rank, run in enumerate(runs):
            got, split = run.kept.get(name, (expected, saved))[0], run.splits.get(name)
            right = expected if split is None else split.take(expected, rank)
            # Outside of the state another shape is right: a rank keeps it for its own heads, such as a bias.
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
    """Return the largest difference, relative to the largest number; non-finite places have to agree."""
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


# -- The verification of a plan, and its report ---------------------------------------------------


TOLERANCES = {torch.float64: 1e-5, torch.float32: 2e-3}
"""The largest differences by rounding, relative to the largest number of their kind."""


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """The differences of one module under a plan, relative to its largest number.

    Attributes:
        name: Its name in the model.
        style: Its style in the plan, "" without one.
        forward: The largest difference of its outputs; ``None`` if they rightly differ between ranks.
        gradient: The largest difference of its parameters' gradients; ``None`` without any.
    """

    name: str
    style: str
    forward: float | None
    gradient: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """The result of :func:`verify`; printed it is a table.

    Attributes:
        ranks: The number of ranks over which the model was split.
        dtype: The type of the computation.
        tolerance: The largest difference by rounding, relative to the largest number of its kind.
        modes: "evaluation" and "training".
        modules: The modules that the plan names or that have parameters, in the order of the model.
        outputs: The largest difference of the model's outputs, relative to the largest of them; ``None`` if
            the run returned none.
        loss: The largest difference of the loss.
        fault: The first module with different numbers, by how much and why; ``None`` if all are equal.
        note: A difference between the verified model and the one that will run.
        batch: The shapes of the batch, and those of the one drawn beside it, if the model takes one. Nothing
            is proven for other shapes and values.
        unreached: Modules that the batches do not reach, and parameters that get no gradient from them.
            Nothing is proven for them.
        idle_lines: Lines of the modules' own ``forward`` that did not run, by class and number. Nothing is
            proven for calls that reach them.
    """

    ranks: int
    dtype: torch.dtype
    tolerance: float
    modes: tuple[str, ...]
    modules: tuple[ModuleReport, ...]
    outputs: float | None
    loss: float | None
    fault: Fault | None
    note: str = ""
    batch: str = ""
    unreached: tuple[str, ...] = ()
    idle_lines: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """Return whether the split model equals the whole one, in all modules that the batch reaches."""
        return self.fault is None

    def assert_ok(self) -> None:
        """Raise unless all numbers are equal.

        Raises:
            VerificationError: Some numbers differ; the message names the first module and has the table.
        """
        if self.fault is not None:
            msg = f"{self.fault}\n{self}"
            raise VerificationError(msg)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain values, as ``tp shard verify --json`` prints them.

        Differences that are not finite become strings: ``"nan"``, ``"inf"``.
        """
        found: dict[str, Any] = _plain({"ok": self.ok, **asdict(self)})
        return found

    def __str__(self) -> str:
        head = ("module", "style", "forward", "gradient")
        rows = [(m.name or "(model)", m.style, _number(m.forward), _number(m.gradient)) for m in self.modules]
        rows += [("outputs", "", _number(self.outputs), ""), ("loss", "", _number(self.loss), "")]
        lengths = [max(len(row[i]) for row in [head, *rows]) for i in range(4)]
        lines = [
            "  ".join(cell.ljust(n) for cell, n in zip(row, lengths, strict=True)).rstrip()
            for row in [head, *rows]
        ]
        dtype = str(self.dtype).removeprefix("torch.")
        scope = f"{self.ranks} ranks, {dtype}, in {' and '.join(self.modes)}{self.note}"
        if self.fault is not None:
            return "\n".join([*lines, scope, f"first difference: {self.fault}"])
        lines.append(f"equal; proven for {self.batch}, on {scope}")
        if self.unreached:
            lines.append(f"not proven, because the batch does not reach it: {', '.join(self.unreached)}")
        if self.idle_lines:
            idle = idle_lines_in_words(self.idle_lines)
            lines.append(f"not proven, because these lines did not run: {idle}")
        return "\n".join(lines)


def verify(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    *,
    loss: Loss | None = None,
    ranks: int | None = None,
    group: GroupLike = None,
) -> Report:
    """Run a whole model and its split form under a plan on one batch, and compare all numbers.

    It compares the outputs of every module, the loss, every gradient and the buffers after the run, in
    evaluation and in training, without dropout. Then the split model trains with dropout, and tensors that
    all ranks hold have to stay the same on them. At last it compares all of this on a batch with other values
    and, where the model takes it, of another shape: in evaluation, and in the third of three optimizer steps.
    The report names modules and lines of ``forward`` that no batch reaches. For those, and for other shapes,
    nothing is proven.

    The ranks are simulated in this process, one after another, on its CPU. No launcher and no other processes
    are needed, and nothing can hang. The model is copied, not changed. It computes in float64 if the copies
    fit into memory. If not, blocks that are built alike share one module; if that does not suffice either, it
    computes in float32. Tensors on the meta device get random values.

    Args:
        model: The model, before it is split or wrapped.
        plan: A plan for :func:`parallelize`.
        batch: The arguments of the model: a mapping by names, a tuple or list in order, or one value.
        loss: A function from the model's output to a scalar; on each rank it gets the output there. By
            default the ``loss`` that the model itself returns, or a fixed sum over all outputs.
        ranks: The number of ranks; by default the size of the group, or 2 for a group of one.
        group: The ranks; the current model-parallel group by default. In a group of several ranks each of
            them calls this, the first one does the work, and all return its result.

    Returns:
        A report, with the first module that differs; ``report.assert_ok()`` turns it into a test.

    Raises:
        ConfigError: The plan does not fit the model, or the copies do not fit into memory.
        ModelError: The model is split or wrapped already, or the whole model fails on the batch.

    Collectives: a broadcast of the report, in a group of several ranks.

    Example:
        >>> model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 8))
        >>> verify(model, {"0": ts.Column(), "2": ts.Row()}, torch.randn(4, 8)).ok
        True
    """
    members = as_group(group)
    count = ranks if ranks is not None else members.size if members.size > 1 else 2
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        msg = f"ranks is a number of 1 or more, got {ranks!r}"
        raise ConfigError(msg)
    check_whole(model)
    if members.size == 1:
        return _verified(model, plan, as_call(batch, loss), count)
    found: list[Any] = [None]
    failure: Exception | None = None
    if members.rank == 0:
        try:
            found[0] = _verified(model, plan, as_call(batch, loss), count)
        except Exception as error:  # noqa: BLE001 - it is raised on all ranks
            failure, found[0] = error, _portable(error)
    # Also after an error: a first rank that raised at once would leave the others waiting here.
    dist.broadcast_object_list(found, group_src=0, group=members.handle)
    if failure is not None:
        raise failure
    if isinstance(found[0], Exception):
        raise found[0]
    report: Report = found[0]
    return report


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent to other processes: the error itself, or one with its text."""
    # Both ways: many errors can be pickled, and fail when they are read because of arguments of their own.
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever a user's class raises
        return ModelError(f"{type(error).__name__}: {error}")
    return error


def as_call(batch: Any, loss: Loss | None = None) -> Call:
    if isinstance(batch, Mapping):
        return Call((), dict(batch), loss)
    if isinstance(batch, tuple | list):
        return Call(tuple(batch), {}, loss)
    return Call((batch,), {}, loss)


def _verified(model: nn.Module, plan: Plan, call: Call, ranks: int) -> Report:
    dtype, share = _what_fits(model)
    copied = probe_copy(model, dtype=dtype, random=False, share=share)
    call = replace(call, args=cast(call.args, dtype), kwargs=cast(call.kwargs, dtype))
    named = {name: style for name, (_, style) in choose(model, plan).items()}
    present = dict(copied.named_modules())
    mine: Plan = {name: style for name, style in named.items() if name in present}
    tolerance, lines, merged = TOLERANCES[dtype], ForwardLines(copied), Comparison()
    modes: dict[str, None] = {}
    batches: dict[str, None] = {}
    unreached: dict[str, None] | None = None
    rate = 0.0
    for tried, steps in _trials(copied, call):
        mode = "training" if tried.training else "evaluation"
        modes[mode] = batches[str(tried)] = None
        updates = Updates(steps - 1 if rate else 0, rate)
        try:
            with lines:
                rows = frozenset(rows_of(copied, mine))
                whole, taken = run_whole_or_detached(copied, tried, rows, updates)
        except Exception as error:
            msg = f"the whole model fails on this batch in {mode}: {type(error).__name__}: {error}"
            raise ModelError(msg) from error
        runs = run_split(copied, mine, taken, ranks, updates=updates)
        comparison = compare(whole, runs, tolerance=tolerance)
        if comparison.fault is not None and _is_random(copied, taken):
            comparison.fault = replace(comparison.fault, reason=_RANDOM)
        _merge(merged, comparison)
        idle = dict.fromkeys(missed(copied, whole))
        unreached = {n: None for n in idle if unreached is None or n in unreached}
        if merged.fault is None and tried.training and steps == 1:
            rate = _rate(copied, whole)
            runs = run_split(copied, mine, taken, ranks, dropout=True)
            merged.fault = compare_ranks(whole, runs, tolerance=tolerance)
        if merged.fault is not None:
            break
    note = "; blocks that are built alike as one" if share else ""
    return Report(
        ranks,
        dtype,
        tolerance,
        tuple(modes),
        tuple(_modules(copied, mine, merged)),
        merged.outputs,
        merged.loss,
        merged.fault,
        note,
        " and ".join(batches),
        tuple(unreached or ()),
        lines.idle(),
    )


def _trials(model: nn.Module, call: Call) -> Iterator[tuple[Call, int]]:
    """Yield calls in evaluation and training, each with the number of optimizer steps until its end.

    Those after the user's own have values and, where the model takes it, a shape of their own.
    """
    yield replace(call, training=False), 1
    yield replace(call, training=True), 1
    other = next((other for other in other_calls(model, call) if takes(model, other)), None)
    if other is not None:
        yield replace(other, training=False), 1
    yield replace(other or call, training=True), _STEPS


_RANDOM = (
    "the whole model draws random numbers that are no dropout of torch, as in a scripted function or noise: "
    "leave them out of the model while it is verified, or leave the block whole"
)


def _is_random(model: nn.Module, call: Call) -> bool:
    """Return whether another seed gives the whole model other numbers, although dropout is left out."""
    first, other = run_whole(model, call, ()), run_whole(model, call, (), seed=1)
    return first.loss is not None and other.loss is not None and not torch.equal(first.loss, other.loss)


def _rate(model: nn.Module, whole: Run) -> float:
    """Return a learning rate with which a step changes weights by a hundredth; 0 without gradients."""
    largest = max(map(_largest, whole.gradients.values()), default=0.0)
    weights = max((_largest(p) for p in model.parameters()), default=0.0)
    return 0.01 * weights / largest if largest else 0.0


def _modules(model: nn.Module, plan: Plan, comparison: Comparison) -> list[ModuleReport]:
    found = []
    for name, module in model.named_modules():
        own = [f"{name}.{p}" if name else p for p in module._parameters]
        gradients = [comparison.gradients[p] for p in own if p in comparison.gradients]
        if name not in plan and not gradients and comparison.forward.get(name, 0.0) == 0.0:
            continue
        style = words(plan[name]) if name in plan else ""
        found.append(ModuleReport(name, style, comparison.forward.get(name), max(gradients, default=None)))
    return found


def _merge(into: Comparison, comparison: Comparison) -> None:
    for mine, other in ((into.forward, comparison.forward), (into.gradients, comparison.gradients)):
        for name, apart in other.items():
            mine[name] = max(mine.get(name, 0.0), apart)
    into.outputs = max((v for v in (into.outputs, comparison.outputs) if v is not None), default=None)
    into.loss = max((v for v in (into.loss, comparison.loss) if v is not None), default=None)
    into.fault = comparison.fault


def _what_fits(model: nn.Module) -> tuple[torch.dtype, bool]:
    """Return the type in which all copies fit into memory, and whether blocks have to share a module."""
    free = free_memory()
    needed = 0
    for dtype, share in ((torch.float64, False), (torch.float64, True), (torch.float32, True)):
        needed = bytes_needed(model, dtype, share=share)
        if needed <= free:
            return dtype, share
    msg = (
        f"comparing the whole model with the split one takes about {needed / 2**30:.0f} GiB of memory, and "
        f"{free / 2**30:.0f} GiB are free; verify the plan on a smaller configuration of the model"
    )
    raise ConfigError(msg)


def free_memory() -> float:
    """Return the number of free bytes of memory; infinity where the system does not report it."""
    free = free_nbytes(torch.device("cpu"))
    return math.inf if free is None else free


def check_whole(model: nn.Module) -> None:
    if not isinstance(model, nn.Module):
        msg = f"the model must be a torch.nn.Module, got {type(model).__name__}: {model!r}"
        raise ModelError(msg)
    check_not_quantized(model, "tp_shard")
    if any(isinstance(m, ParallelLayer) and m.group.size > 1 for m in model.modules()):
        msg = "the model is split already; a plan is verified on the whole model, before parallelize()"
        raise ModelError(msg)
    lazy = next((n for n, p in model.named_parameters() if isinstance(p, nn.UninitializedParameter)), None)
    if lazy is not None:
        msg = f"{lazy} has no values before the model has seen an input; call the model with a batch first"
        raise ModelError(msg)
    if any(map(is_dtensor, model.parameters())):
        msg = (
            "the model's parameters are DTensors; a plan is verified on the plain model, before fully_shard()"
        )
        raise ModelError(msg)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(below) for key, below in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(below) for below in value]
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _number(value: float | None) -> str:
    return "" if value is None else "0" if value == 0 else f"{value:.1e}"
