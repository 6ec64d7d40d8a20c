"""Verifying a plan: the split model computes what the whole one does, or the first module that does not."""

import math
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from tp_core.errors import ConfigError, ModelError
from tp_core.internal import is_dtensor

from tp_shard._groups._group import GroupLike, as_group
from tp_shard._plans._choose import choose
from tp_shard._plans._describe import words
from tp_shard._plans._styles import Plan
from tp_shard._shards._layer import ParallelLayer
from tp_shard._verify._call import Call, Loss, cast
from tp_shard._verify._compare import Comparison, Fault, compare, compare_ranks, missed
from tp_shard._verify._copies import bytes_needed, probe_copy
from tp_shard._verify._runs import rows_of, run_split, run_whole_or_detached
from tp_shard.errors import VerificationError

__all__ = ["ModuleReport", "Report", "as_call", "check_whole", "tolerance_of", "verify"]

_TOLERANCES = {torch.float64: 1e-5, torch.float32: 2e-3}


@dataclass(frozen=True, slots=True)
class ModuleReport:
    """What a plan does to the numbers of one module, relative to the largest of them.

    Attributes:
        name: Its name in the model.
        style: What the plan says of it, "" if nothing.
        forward: The largest difference of its outputs; ``None`` where ranks rightly have others.
        gradient: The largest difference of its parameters' gradients; ``None`` without any.
    """

    name: str
    style: str
    forward: float | None
    gradient: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """What :func:`verify` found; printed it is a table.

    Attributes:
        ranks: Over how many ranks the model was split.
        dtype: What was computed in.
        tolerance: What may differ by rounding, relative to the largest number of its kind.
        modes: "evaluation" and "training".
        modules: Those that the plan names or that have parameters, in the order of the model.
        outputs: The largest difference of the model's outputs, relative to the largest of them; ``None`` if
            it came to none.
        loss: That of the loss.
        fault: The first module whose numbers differ, by how much and why; ``None`` if all are equal.
        note: What was verified otherwise than it will run.
        batch: What the model was called with; nothing is proven of other shapes and values.
        unreached: Modules that the batch does not reach, and parameters that get no gradient from it: of
            those nothing is proven.
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

    @property
    def ok(self) -> bool:
        """Return whether the split model computes what the whole one does, in all that the batch reaches."""
        return self.fault is None

    def assert_ok(self) -> None:
        """Do nothing if all numbers are equal.

        Raises:
            VerificationError: Some numbers differ; the message names the first module and has the table.
        """
        if self.fault is not None:
            msg = f"{self.fault}\n{self}"
            raise VerificationError(msg)

    def to_dict(self) -> dict[str, Any]:
        """Return the attributes as plain values, as ``tp shard verify --json`` prints them.

        Differences that are not finite, as those of NaN, are their names: ``"nan"``, ``"inf"``.
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
    """Run a whole model and the one that a plan makes of it on one batch, and compare all numbers.

    Outputs of every module, the loss, every gradient and the buffers that the run leaves are compared, in
    evaluation and in training, with dropout left out. Then the split model trains with dropout, and what all
    ranks hold has to stay the same on them. What the batch does not reach is named in the report:
    of that, and of other shapes and values, nothing is proven.

    The ranks are simulated in this process, one after the other, on its CPU: neither a launcher nor other
    processes are needed, and nothing can hang. The model is copied, not changed, and computes in float64
    where the copies fit into memory; else in float32, with blocks that are built alike as one. What is on
    the meta device gets random values.

    Args:
        model: The model, before it is split or wrapped.
        plan: What :func:`parallelize` takes.
        batch: What the model is called with: a mapping by names, a tuple or list in order, or one value.
        loss: Makes a scalar of what the model returns, on each rank of what it returns there. By default
            the ``loss`` that the model itself returns, or a fixed sum over all that it returns.
        ranks: Over how many ranks; by default as many as the group has, or 2 where there is one alone.
        group: The ranks; the current model-parallel group by default. In a group of several each rank calls
            this, the first one does the work, and all return what it found.

    Returns:
        A report, with the first module whose numbers differ; ``report.assert_ok()`` makes a test of it.

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
    if members.rank == 0:
        try:
            found[0] = _verified(model, plan, as_call(batch, loss), count)
        except Exception as error:  # noqa: BLE001 - it is raised on all ranks
            found[0] = error
    dist.broadcast_object_list(found, group_src=0, group=members.handle)
    if isinstance(found[0], Exception):
        raise found[0]
    report: Report = found[0]
    return report


def as_call(batch: Any, loss: Loss | None = None) -> Call:
    """Return the call that a batch stands for."""
    if isinstance(batch, Mapping):
        return Call((), dict(batch), loss)
    if isinstance(batch, tuple | list):
        return Call(tuple(batch), {}, loss)
    return Call((batch,), {}, loss)


def tolerance_of(dtype: torch.dtype) -> float:
    """Return what may differ by rounding alone, relative to the largest number of its kind."""
    return _TOLERANCES[dtype]


def _verified(model: nn.Module, plan: Plan, call: Call, ranks: int) -> Report:
    dtype, share = _what_fits(model)
    copied = probe_copy(model, dtype=dtype, random=False, share=share)
    call = replace(call, args=cast(call.args, dtype), kwargs=cast(call.kwargs, dtype))
    named = {name: style for name, (_, style) in choose(model, plan).items()}
    present = dict(copied.named_modules())
    mine: Plan = {name: style for name, style in named.items() if name in present}
    merged = Comparison()
    modes: list[str] = []
    unreached: dict[str, None] | None = None
    for mode in ("evaluation", "training"):
        modes.append(mode)
        tried = replace(call, training=mode == "training")
        try:
            whole, tried = run_whole_or_detached(copied, tried, frozenset(rows_of(copied, mine)))
        except Exception as error:
            msg = f"the whole model fails on this batch in {mode}: {type(error).__name__}: {error}"
            raise ModelError(msg) from error
        comparison = compare(whole, run_split(copied, mine, tried, ranks), tolerance=tolerance_of(dtype))
        _merge(merged, comparison)
        idle = dict.fromkeys(missed(copied, whole))
        unreached = {n: None for n in idle if unreached is None or n in unreached}
        if comparison.fault is not None:
            break
        if tried.training:
            runs = run_split(copied, mine, tried, ranks, dropout=True)
            merged.fault = compare_ranks(whole, runs, tolerance=tolerance_of(dtype))
    note = "; blocks that are built alike as one" if share else ""
    return Report(
        ranks,
        dtype,
        tolerance_of(dtype),
        tuple(modes),
        tuple(_modules(copied, mine, merged)),
        merged.outputs,
        merged.loss,
        merged.fault,
        note,
        str(call),
        tuple(unreached or ()),
    )


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
    """Return in what type, and whether with blocks that are alike as one, all the copies fit into memory."""
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


def free_memory() -> int:
    """Return how many bytes of memory are free."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")


def check_whole(model: nn.Module) -> None:
    """Make sure that it is a model that a plan can be tried on.

    Raises:
        ModelError: It is no module, is split, or has layers without weights yet.
    """
    if not isinstance(model, nn.Module):
        msg = f"the model must be a torch.nn.Module, got {type(model).__name__}: {model!r}"
        raise ModelError(msg)
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
