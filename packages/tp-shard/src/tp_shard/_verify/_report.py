"""The verification of a plan: the first difference between the split model and the whole one, if any."""

import math
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from tp_core import free_nbytes
from tp_core.arguments import explain_arguments
from tp_core.compare import (
    Bound,
    ForwardLines,
    cut_dim,
    distance,
    idle_lines_in_words,
    norm_of,
    relative_error,
)
from tp_core.errors import ConfigError, ModelError, TpError
from tp_core.tensors import check_not_quantized, is_dtensor

from tp_shard._groups._group import GroupLike, as_group
from tp_shard._plans._maker import choose
from tp_shard._plans._parallelize import words
from tp_shard._plans._styles import Plan
from tp_shard._shards import ParallelLayer
from tp_shard._split import Split
from tp_shard._verify._examples import Loss, TrialCall, bytes_needed, cast, other_calls, probe_copy
from tp_shard._verify._simulate import (
    TrialRun,
    Updates,
    reference,
    rows_of,
    run_split,
    run_whole,
    takes,
)
from tp_shard.errors import VerificationError

_STEPS = 3  # optimizer steps on the batch of its own
_ROUNDING = 1e-5  # of the largest gradient: what a report shows of one below it is relative to this much
_RELATED = 1e-3  # of a norm: what a difference is taken for, in words, may be as far from it


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
class SplitComparison:
    """The differences between two runs, each as a share of the norm of the whole.

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


def compare(whole: TrialRun, runs: list[TrialRun]) -> SplitComparison:
    comparison = SplitComparison()
    faults = (fault for fault in _faults(whole, runs, comparison) if fault is not None)
    comparison.fault = next(faults, None)
    return comparison


def compare_ranks(whole: TrialRun, runs: list[TrialRun]) -> Fault | None:
    """Return the first whole tensor that differs between runs with dropout; ``whole`` is one without."""
    failed = next((run for run in runs if run.error is not None), None)
    if failed is not None:
        return _raised(failed)
    first, bound = runs[0], Bound.of(whole.dtypes)
    reason = (
        "ranks draw different random numbers for what all of them hold, and would train apart: look for a "
        "ts.nn.ParallelDropout, or a generator or seed of each rank's own, on what is not split"
    )
    shapes = {key: tensor.shape for key, tensor in _numbered(whole.steps)}
    other_runs = [dict(_numbered(run.steps)) for run in runs[1:]]
    for key, expected in _numbered(first.steps):
        if key[0] in first.cuts or expected.shape != shapes.get(key):
            continue  # a rank has its own part
        of_others = [
            other[key] for other in other_runs if key in other and other[key].shape == expected.shape
        ]
        if any(distance(expected, tensor) > bound.limit(expected) for tensor in of_others):
            return Fault(key[0], "with dropout its outputs differ between ranks", reason)
    for name, value in first.gradients.items():
        same = [run.gradients.get(name) for run in runs[1:]]
        if name not in first.splits and any(_gradient_differs(value, other, bound) for other in same):
            return Fault(
                name.rpartition(".")[0], f"with dropout the gradient of {name} differs between ranks", reason
            )
    for name, (kept, saved) in first.kept.items():
        others_kept = [run.kept[name][0] for run in runs[1:] if name in run.kept]
        is_whole = saved and name not in first.splits
        if is_whole and any(distance(kept, tensor) > bound.limit(kept) for tensor in others_kept):
            return Fault(name.rpartition(".")[0], f"with dropout its {name} differs between ranks", reason)
    return None


def missed(model: nn.Module, whole: TrialRun) -> Iterator[str]:
    """Yield the names of modules that a run did not call, and of parameters without a gradient from it."""
    for path, module in model.named_modules():
        start = f"{path}." if path else ""
        names = [start + name for name, p in module._parameters.items() if p is not None]
        idle = [name for name in names if name in whole.gradients and whole.gradients[name] is None]
        if path in whole.called:
            yield from idle
        elif names and not set(whole.gradients) & set(names) - set(idle):
            yield path


def _faults(whole: TrialRun, runs: list[TrialRun], comparison: SplitComparison) -> Iterator[Fault | None]:
    bound = Bound.of(whole.dtypes)
    forward = _forward(whole, runs, comparison, bound)
    failed = next((run for run in runs if run.error is not None), None)
    if failed is not None:
        yield forward  # a difference before the error explains more
        yield _raised(failed)
        return
    yield forward
    yield _outputs(whole, runs, comparison, bound)
    yield _gradients(whole, runs, comparison, bound)
    yield _inputs(whole, runs, bound)
    yield _tensor_fault(whole, runs, bound)


def _raised(run: TrialRun) -> Fault:
    where = run.entered[-1] if run.entered else ""
    error: BaseException | None = run.error
    if isinstance(error, ModelError) and error.__cause__ is not None:
        error = error.__cause__  # the error inside the one of `guard_forward`
    text = str(error).strip().splitlines() or [""]
    failure = f"{type(error).__name__} in its {run.stage}"
    if isinstance(error, TpError):
        return Fault(where, failure, str(error))
    return Fault(
        where,
        failure,
        f"{text[0]}; a module around split layers that counts all heads or features by itself "
        "needs ts.Local(...), "
        "which lets it count those of its rank",
    )


def _forward(
    whole: TrialRun, runs: list[TrialRun], comparison: SplitComparison, bound: Bound
) -> Fault | None:
    numbered = [dict(_numbered(run.steps)) for run in runs]
    nudged = dict(_numbered(whole.nudged.steps))
    inputs = dict(_numbered(whole.row_inputs))
    first: Fault | None = None
    for (name, nth), expected in _numbered(whole.steps):
        for rank, (run, steps) in enumerate(zip(runs, numbered, strict=True)):
            got = steps.get((name, nth))
            if got is None:
                continue
            cut = run.cuts.get(name)
            right = _part(expected, cut, rank)
            if right.shape != got.shape:
                continue  # the rank's part of the features inside a block is not known from outside
            apart = relative_error(right, got)
            comparison.forward[name] = max(comparison.forward.get(name, 0.0), apart)
            near = nudged.get((name, nth))
            if near is not None:
                near = _part(near, cut, rank)
            limit = bound.limit(right, near)
            if distance(right, got) > limit and first is None:
                reason = "it computes something else on a rank than in one piece"
                if (name, nth) in inputs:
                    parts = [dict(_numbered(run.row_inputs)).get((name, nth)) for run in runs]
                    reason = _why_row(inputs[name, nth], parts, run.splits.get(f"{name}.weight"), bound)
                first = Fault(name, f"outputs differ by {apart:.2g} on rank {rank}", reason)
    return first


def _why_row(whole: Tensor, parts: list[Tensor | None], cut: Split | None, bound: Bound) -> str:
    """Return the reason why a row layer's output differs, from its inputs on the ranks."""
    if all(part is not None and part.shape[:-1] == whole.shape[:-1] for part in parts):
        tensors = [part for part in parts if part is not None]
        joined = torch.cat(tensors, -1)
        if joined.shape == whole.shape:
            if cut is not None:
                features = Split(-1, cut.size, cut.ranges)
                right = torch.cat([features.take(whole, rank) for rank in range(len(tensors))], -1)
                if right.shape == joined.shape and distance(right, joined) <= bound.limit(whole):
                    return "what reaches it is right on each rank; its product, or the sum over ranks, is not"
            if distance(whole.sort(-1).values, joined.sort(-1).values) <= bound.limit(whole):
                return "the features that reach it stand in another order than it is cut"
            return (
                "what reaches it is not each rank's part of what reaches it in one piece: the layers before "
                "it hold their features in another order than the plan says, or what stands between mixes "
                "features of ranks"
            )
    return "what reaches it is not as wide as what reaches it in one piece"


def _outputs(
    whole: TrialRun, runs: list[TrialRun], comparison: SplitComparison, bound: Bound
) -> Fault | None:
    worst = 0.0
    wrong = ""
    for name, expected in whole.outputs.items():
        got = [run.outputs.get(name) for run in runs]
        tensors = [tensor for tensor in got if tensor is not None]
        if len(tensors) < len(got):
            return Fault("", f"{name} of its output is missing on a rank", "the ranks take other branches")
        limit = bound.limit(expected, whole.nudged.outputs.get(name))
        joined = _joined(expected, tensors)
        apart = max(relative_error(expected, result) for result in joined)
        worst = max(worst, apart)
        if not wrong and any(distance(expected, result) > limit for result in joined):
            wrong = f"{name} of its output differs by {apart:.2g}"
    comparison.outputs = worst
    if wrong:
        return Fault("", wrong, "and no module inside before it")
    for rank, run in enumerate(runs):
        if whole.loss is not None and run.loss is not None:
            apart = relative_error(whole.loss, run.loss)
            comparison.loss = max(comparison.loss or 0.0, apart)
            if distance(whole.loss, run.loss) <= bound.limit(whole.loss, whole.nudged.loss):
                continue
            if all(r.outputs[n].shape == t.shape for r in runs for n, t in whole.outputs.items()):
                return Fault("", f"the loss differs by {apart:.2g} on rank {rank}", "and its outputs do not")
            return Fault(
                "",
                f"the loss differs by {apart:.2g} on rank {rank}",
                "its outputs are split: give a loss that takes them so, such as "
                "ts.nn.functional.parallel_cross_entropy, or let the head join them with "
                "gather_output=True",
            )
    return None


def _joined(expected: Tensor, got: list[Tensor]) -> list[Tensor]:
    """Return outputs of ranks as they are, or joined where each rank has a part along one dimension."""
    dim = cut_dim(expected, got)
    if dim is None:
        return got
    return [torch.cat(got, dim)]


def _gradients(
    whole: TrialRun, runs: list[TrialRun], comparison: SplitComparison, bound: Bound
) -> Fault | None:
    last = {name: i for i, (name, _) in enumerate(whole.steps)}
    scales: dict[str, float] = {}
    for name, gradient in whole.gradients.items():
        owner = name.rpartition(".")[0]
        scales[owner] = max(scales.get(owner, 0.0), _norm(gradient))
    overall = max(scales.values(), default=0.0)
    wrong: list[tuple[int, Fault]] = []
    for name, expected in whole.gradients.items():
        owner = name.rpartition(".")[0]
        # A gradient that is rounding alone is measured relative to the others.
        scale = max(scales[owner], _ROUNDING * overall)
        shards = [run.gradients.get(name) for run in runs]
        split = runs[0].splits.get(name)
        apart = 0.0
        is_wrong = False
        for rank, (got, run) in enumerate(zip(shards, runs, strict=True)):
            right = _taken(expected, run.splits.get(name), rank)
            near = _taken(whole.nudged.gradients.get(name), run.splits.get(name), rank)
            apart = max(apart, _gradient_error(right, got, scale))
            is_wrong |= _gradient_differs(right, got, bound, near, overall)
        if expected is not None or any(g is not None for g in shards):
            comparison.gradients[name] = apart
        if is_wrong:
            message = f"the gradient of {name} differs by {apart:.2g}"
            fault = Fault(owner, message, _why(expected, shards, split, scale))
            wrong.append((last.get(owner, -1), fault))
    if not wrong:
        return None
    # Backward meets the last module first: what is wrong there explains the rest.
    _, fault = max(wrong, key=lambda item: item[0])
    return fault


@overload
def _taken(whole: Tensor, split: Split | None, rank: int) -> Tensor: ...


@overload
def _taken(whole: None, split: Split | None, rank: int) -> None: ...


@overload
def _taken(whole: Tensor | None, split: Split | None, rank: int) -> Tensor | None: ...


def _taken(whole: Tensor | None, split: Split | None, rank: int) -> Tensor | None:
    if whole is None or split is None:
        return whole
    return split.take(whole, rank)


def _gradient_error(right: Tensor | None, got: Tensor | None, scale: float) -> float:
    """Return the difference of gradients as a share of ``scale``; none is as good as zeros."""
    if right is None or got is None:
        if not scale:
            return 0.0
        return max(_norm(right), _norm(got)) / scale
    return relative_error(right, got, scale)


def _gradient_differs(
    right: Tensor | None,
    got: Tensor | None,
    bound: Bound,
    near: Tensor | None = None,
    scale: float | None = None,
) -> bool:
    """Return whether gradients differ by more than rounding; none is as good as zeros."""
    if right is None and got is None:
        return False
    if right is None:
        right = torch.zeros_like(got)  # type: ignore[arg-type]  # one of them is there
    if got is None:
        got = torch.zeros_like(right)
    return distance(right, got) > bound.limit(right, near, scale)


def _why(expected: Tensor | None, got: list[Tensor | None], split: Split | None, scale: float) -> str:
    ranks = len(got)
    tensors = [g for g in got if g is not None]
    scale = _norm(expected) or scale  # by its own scale: on a larger one any multiple would match
    if expected is not None and len(tensors) == ranks and split is None:
        if relative_error(expected, torch.stack(tensors).sum(0), scale) < _RELATED:
            return (
                "each rank has the gradient of its own part of the heads or features alone, and they have to "
                "be summed: give the module ts.Replicated() in the plan"
            )
        if all(relative_error(expected * ranks, g, scale) < _RELATED for g in tensors):
            return (
                f"it is summed over {ranks} ranks that all have the whole of it: leave the module "
                "out of the plan"
            )
        if any(relative_error(tensors[0], g, scale) > _RELATED for g in tensors):
            return "it differs between ranks: part of what it works on is a rank's own"
    if expected is None or split is None:
        return "what follows it goes backward otherwise than in one piece"
    parts = [split.take(expected, rank) * ranks for rank in range(len(tensors))]
    if all(relative_error(part, g, scale) < _RELATED for part, g in zip(parts, tensors, strict=True)):
        return f"it is {ranks} times too large: what follows is done by all ranks, and its gradient summed"
    return "what follows it goes backward otherwise than in one piece"


def _inputs(whole: TrialRun, runs: list[TrialRun], bound: Bound) -> Fault | None:
    # The gradient of positions is rounding alone if all values that they attend to are equal.
    scale = max(map(_norm, [*whole.inputs.values(), *whole.gradients.values()]), default=0.0)
    for name, expected in whole.inputs.items():
        near = whole.nudged.inputs.get(name)
        for rank, run in enumerate(runs):
            got = run.inputs.get(name)
            if _gradient_differs(expected, got, bound, near, scale):
                apart = _gradient_error(expected, got, _norm(expected) or scale)
                reason = "each rank has the gradient of its own part alone, or it is summed too often"
                return Fault(
                    "", f"the gradient of its argument {name} differs by {apart:.2g} on rank {rank}", reason
                )
    return None


def _tensor_fault(whole: TrialRun, runs: list[TrialRun], bound: Bound) -> Fault | None:
    for name, (expected, saved) in whole.kept.items():
        for rank, run in enumerate(runs):
            got, _ = run.kept.get(name, (expected, saved))
            split = run.splits.get(name)
            right = _taken(expected, split, rank)
            # Outside of the state another shape is right: a rank keeps it for its own heads, such as a bias.
            if right.shape != got.shape and not saved:
                continue
            nudged, _ = whole.nudged.kept.get(name, (None, False))
            limit = bound.limit(right, _taken(nudged, split, rank))
            if distance(right, got) > limit:
                apart = relative_error(right, got)
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
    if tensor.is_sparse:
        tensor = tensor.to_dense()
    return float(tensor.detach().abs().nan_to_num(0.0, 0.0, 0.0).max())


def _norm(tensor: Tensor | None) -> float:
    if tensor is None:
        return 0.0
    return norm_of(tensor)


# -- The verification of a plan, and its report ---------------------------------------------------


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """The differences of one module under a plan, each as a share of the whole tensor's norm.

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
class PlanReport:
    """The result of :func:`verify`; printed it is a table.

    Attributes:
        ranks: The number of ranks over which the model was split.
        dtype: The type of the computation.
        tolerance: The largest difference by rounding, as a share of a tensor's norm, beside what the model's
            own rounding explains: see :class:`tp_core.compare.Bound`.
        modes: "evaluation" and "training".
        modules: The modules that the plan names or that have parameters, in the order of the model.
        outputs: The largest difference of the model's outputs, as a share of their norm; ``None`` if the run
            returned none.
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
        plain: dict[str, Any] = _plain({"ok": self.ok, **asdict(self)})
        return plain

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


@explain_arguments("verify(model, plan, batch)")
def verify(
    model: nn.Module,
    plan: Plan,
    batch: Any,
    *,
    loss: Loss | None = None,
    ranks: int | None = None,
    group: GroupLike = None,
) -> PlanReport:
    """Run a whole model and its split form under a plan on one batch, and compare all numbers.

    It compares the outputs of every module, the loss, every gradient and the buffers after the run, in
    evaluation and in training, without dropout. Then the split model trains with dropout, and tensors that
    all ranks hold have to stay the same on them. At last it compares all of this on a batch with other values
    and, where the model takes it, of another shape: in evaluation, and in the third of three optimizer steps.
    The report names modules and lines of ``forward`` that no batch reaches. For those, and for other shapes,
    nothing is proven.

    The ranks are simulated in this process, one after another, on its CPU. No launcher and no other processes
    are needed, and nothing can hang. The model is copied, not changed. It computes in float64 if the copies
    fit into memory. If not, equal blocks share one module; if that does not suffice either, it
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
    count = ranks
    if count is None:
        count = max(2, members.size)
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        msg = f"ranks is a number of 1 or more, got {ranks!r}"
        raise ConfigError(msg)
    check_whole(model)
    if members.size == 1:
        return _verified(model, plan, as_call(batch, loss), count)
    outcome: list[Any] = [None]  # the report, or an error
    failure: Exception | None = None
    if members.rank == 0:
        try:
            outcome[0] = _verified(model, plan, as_call(batch, loss), count)
        except Exception as error:  # noqa: BLE001 - it is raised on all ranks
            failure = error
            outcome[0] = _portable(error)
    # Also after an error: a first rank that raised at once would leave the others waiting here.
    dist.broadcast_object_list(outcome, group_src=0, group=members.handle)
    if failure is not None:
        raise failure
    if isinstance(outcome[0], Exception):
        raise outcome[0]
    report: PlanReport = outcome[0]
    return report


def _portable(error: Exception) -> Exception:
    """Return an error that can be sent to other processes: the error itself, or one with its text."""
    # Written and read: many errors can be pickled, and fail when they are read, by arguments of their own.
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # noqa: BLE001 - whatever a user's class raises
        return ModelError(f"{type(error).__name__}: {error}")
    return error


def as_call(batch: Any, loss: Loss | None = None) -> TrialCall:
    if isinstance(batch, Mapping):
        return TrialCall((), dict(batch), loss)
    if isinstance(batch, tuple | list):
        return TrialCall(tuple(batch), {}, loss)
    return TrialCall((batch,), {}, loss)


def _verified(model: nn.Module, plan: Plan, call: TrialCall, ranks: int) -> PlanReport:
    dtype, share = _what_fits(model)
    copied = probe_copy(model, dtype=dtype, random=False, share=share)
    call = replace(call, args=cast(call.args, dtype), kwargs=cast(call.kwargs, dtype))
    styles = {name: style for name, (_, style) in choose(model, plan).items()}
    present = dict(copied.named_modules())
    own_plan: Plan = {name: style for name, style in styles.items() if name in present}
    lines = ForwardLines(copied)
    merged = SplitComparison()
    dtypes = {dtype}
    modes: dict[str, None] = {}
    batches: dict[str, None] = {}
    unreached: dict[str, None] | None = None
    rate = 0.0
    for tried, steps in _trials(copied, call):
        mode = "training" if tried.training else "evaluation"
        modes[mode] = batches[str(tried)] = None
        update_count = steps - 1 if rate else 0
        updates = Updates(update_count, rate)
        try:
            with lines:
                rows = frozenset(rows_of(copied, own_plan))
                whole, example = reference(copied, tried, rows, updates)
        except Exception as error:
            msg = f"the whole model fails on this batch in {mode}: {type(error).__name__}: {error}"
            raise ModelError(msg) from error
        runs = run_split(copied, own_plan, example, ranks, updates=updates)
        comparison = compare(whole, runs)
        dtypes |= whole.dtypes
        if comparison.fault is not None and _is_random(copied, example):
            comparison.fault = replace(comparison.fault, reason=_RANDOM)
        _merge(merged, comparison)
        idle = dict.fromkeys(missed(copied, whole))
        unreached = {n: None for n in idle if unreached is None or n in unreached}
        if merged.fault is None and tried.training and steps == 1:
            rate = _rate(copied, whole)
            runs = run_split(copied, own_plan, example, ranks, dropout=True)
            merged.fault = compare_ranks(whole, runs)
        if merged.fault is not None:
            break
    note = "; equal blocks as one" if share else ""
    return PlanReport(
        ranks,
        dtype,
        Bound.of(dtypes).rtol,
        tuple(modes),
        tuple(_modules(copied, own_plan, merged)),
        merged.outputs,
        merged.loss,
        merged.fault,
        note,
        " and ".join(batches),
        tuple(unreached or ()),
        lines.idle(),
    )


def _trials(model: nn.Module, call: TrialCall) -> Iterator[tuple[TrialCall, int]]:
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


def _is_random(model: nn.Module, call: TrialCall) -> bool:
    """Return whether another seed gives the whole model other numbers, although dropout is left out."""
    first, other = run_whole(model, call, ()), run_whole(model, call, (), seed=1)
    return first.loss is not None and other.loss is not None and not torch.equal(first.loss, other.loss)


def _rate(model: nn.Module, whole: TrialRun) -> float:
    """Return a learning rate with which a step changes weights by a hundredth; 0 without gradients."""
    largest = max(map(_largest, whole.gradients.values()), default=0.0)
    weights = max((_largest(p) for p in model.parameters()), default=0.0)
    if not largest:
        return 0.0
    return 0.01 * weights / largest


def _modules(model: nn.Module, plan: Plan, comparison: SplitComparison) -> list[ModuleReport]:
    reports = []
    for name, module in model.named_modules():
        own = [f"{name}.{p}" if name else p for p in module._parameters]
        gradients = [comparison.gradients[p] for p in own if p in comparison.gradients]
        if name not in plan and not gradients and comparison.forward.get(name, 0.0) == 0.0:
            continue
        style = words(plan[name]) if name in plan else ""
        forward = comparison.forward.get(name)
        reports.append(ModuleReport(name, style, forward, max(gradients, default=None)))
    return reports


def _merge(into: SplitComparison, comparison: SplitComparison) -> None:
    for merged, other in ((into.forward, comparison.forward), (into.gradients, comparison.gradients)):
        for name, apart in other.items():
            merged[name] = max(merged.get(name, 0.0), apart)
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
    if free is None:
        return math.inf
    return free


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
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _number(value: float | None) -> str:
    if value is None:
        return ""
    if not value:
        return "0"
    return f"{value:.1e}"
