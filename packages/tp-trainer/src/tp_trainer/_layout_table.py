"""The layouts of a job over devices that need not exist, by the memory that each needs: ``tp estimate``."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from tp_core import LaunchEnvironment
from tp_core.arguments import explain_arguments
from tp_core.device_types import EXAMPLE
from tp_core.discovery import KNOWN_BACKENDS, Contribution
from tp_core.errors import ConfigError, ModelError
from tp_core.jobs import Axis, Layout, MemoryNeed, Precision, Recomputation
from tp_core.plugins import Backend, Job, registry

from tp_trainer._activations import recomputations
from tp_trainer._checks import check_known, check_model, check_positive
from tp_trainer._footprints import StepFootprints
from tp_trainer._memory import parse_nbytes, row_count_of
from tp_trainer._steps._step import Step

_SPLITTING = ("context", "pipeline", "shard")
"""Backends in packages of their own, which are named where they are missing."""

_CHECKPOINTS: Mapping[Recomputation, str] = {
    "all but matmuls": 'checkpoint_activations(model, keep="matmuls")',
    "every 2nd block": "checkpoint_activations(model, every=2)",
    "every block": "checkpoint_activations(model)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutNeed:
    """A layout with the memory of its fullest rank.

    Attributes:
        backend: The backend's name.
        layout: Its axes and options.
        is_launched: Whether each rank is a process; else one process has all devices.
        recomputation: What the backward pass computes again.
        memory: The memory of the fullest rank.
    """

    backend: str
    layout: Layout
    is_launched: bool
    recomputation: Recomputation
    memory: MemoryNeed

    @property
    def name(self) -> str:
        """The axes with more than one rank."""
        return _name_of(self.layout)

    @property
    def backends(self) -> str:
        """The names of the backend, and of the one that holds its weights."""
        return _backends_of(self.backend, self.layout)

    def lines(self, *, accumulate: int, precision: Precision) -> list[str]:
        """Return what starts it: the command, and the lines of the script."""
        if self.is_launched:
            command = f"tp launch -n {self.layout.ranks} train.py"
        else:
            command = "python train.py"
        lines = [command]
        lines += self.layout.setup.splitlines()
        if self.recomputation in _CHECKPOINTS:
            lines.append(_CHECKPOINTS[self.recomputation])
        arguments = [f'backend="{self.backend}"']
        if precision != "fp32":
            arguments.append(f'precision="{precision}"')
        if accumulate > 1:
            arguments.append(f"accumulate={accumulate}")
        if self.layout.options:
            arguments.append(f"options={_written(self.layout.options)}")
        return [*lines, f"Trainer({', '.join(arguments)})"]


def _name_of(layout: Layout) -> str:
    sizes = {axis: layout.axes.get(axis, 1) for axis in get_args(Axis)}
    return " x ".join(f"{axis} {ranks}" for axis, ranks in sizes.items() if ranks > 1) or "one device"


def _backends_of(backend: str, layout: Layout) -> str:
    return " + ".join([backend, *(name for name in layout.options if name != backend)])


def _written(value: object) -> str:
    """Return a value as it is written in a script; an object of options by the fields that differ."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f'"{key}": {_written(v)}' for key, v in value.items()) + "}"
    if isinstance(value, str):
        return f'"{value}"'
    if is_dataclass(value) and not isinstance(value, type):
        arguments = [
            f"{field.name}={_written(getattr(value, field.name))}"
            for field in fields(value)
            if field.default is MISSING or getattr(value, field.name) != field.default
        ]
        return f"{type(value).__name__}({', '.join(arguments)})"
    return repr(value)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayoutTable:
    """The layouts of a job with what each needs; ``str()`` returns a table.

    Attributes:
        layouts: For each backend and axes the first options that fit, from the least memory to the most;
            then those of which no options fit, from the one that lacks least.
        left_out: The reason why a backend has no layout here, by its name.
        devices: The number of devices.
        samples: The samples of each device in a batch; ``None`` where they are not known.
        precision: As of the trainer.
        accumulate: The batches of an optimizer step.
        free_nbytes: The free bytes of each device; ``None`` if unknown.
        unknown: The reason why something is not known; empty if all is.
    """

    layouts: tuple[LayoutNeed, ...]
    left_out: Mapping[str, str]
    devices: int
    samples: int | None
    precision: Precision
    accumulate: int
    free_nbytes: int | None
    unknown: str

    @property
    def fitting(self) -> list[LayoutNeed]:
        """The layouts that fit."""
        return [layout for layout in self.layouts if layout.memory.fits]

    def __str__(self) -> str:
        totals = [layout.memory.taken for layout in self.layouts]
        unit, size = ("GiB", 2**30) if max([*totals, self.free_nbytes or 0]) >= 2**30 else ("MiB", 2**20)
        head = f"{self.devices} device{'s' * (self.devices != 1)}"
        if self.samples is not None:
            head += f", {self.samples} sample{'s' * (self.samples != 1)} on each"
        head += f", {self.precision}"
        if self.free_nbytes is not None:
            head += f", {self.free_nbytes / size:.1f} {unit} free"
        lines = [f"{head}; {unit} of the fullest device, the least first", *self._rows(size)]
        lacking = [layout for layout in self.layouts if not layout.memory.fits]
        if lacking:
            lines.append("do not fit:")
        for layout in lacking:
            if layout.recomputation == "nothing":
                again = ""
            else:
                again = f", {layout.recomputation} again"
            lines.append(f"  {layout.name} ({layout.backends}{again}): {layout.memory}")
        remedies = [layout.memory.remedy for layout in lacking if layout.memory.remedy]
        lines += [f"  {remedy}" for remedy in dict.fromkeys(remedies)]
        lines += [f"left out: {name}: {reason}" for name, reason in self.left_out.items()]
        if self.unknown:
            lines.append(f"not known: {self.unknown}")
        return "\n".join(lines)

    def _rows(self, size: int) -> Iterator[str]:
        """Yield a row for each layout that fits, and what starts it."""
        if not self.fitting:
            yield "  none fits"
            return
        parts = ("weights", "grads", "optim", "comm", "activations")
        table: list[tuple[str, ...]] = [("total", "reserved", *parts, "again", "layout", "backend")]
        for layout in self.fitting:
            need = layout.memory
            sizes = (
                need.total,
                need.reserved,
                need.weights,
                need.gradients,
                need.optimizer,
                need.communication,
                need.activations,
            )
            shown = ["?" if nbytes is None else f"{nbytes / size:.1f}" for nbytes in sizes]
            table.append((*shown, layout.recomputation, layout.name, layout.backends))
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for number, cells in enumerate(table):
            numbers = [cell.rjust(width) for cell, width in zip(cells[:7], widths[:7], strict=True)]
            words = [cell.ljust(width) for cell, width in zip(cells[7:], widths[7:], strict=True)]
            yield "  ".join(["", *numbers, *words]).rstrip()
            if number:
                command, *script = self._start(self.fitting[number - 1])
                yield f"    {command}"
                yield from (f"        {line}" for line in script)
                if kernels := self.fitting[number - 1].memory.kernels:
                    yield f"    {kernels}"

    def _start(self, layout: LayoutNeed) -> list[str]:
        return layout.lines(accumulate=self.accumulate, precision=self.precision)

    def to_dict(self) -> dict[str, Any]:
        """Return the table as values for JSON."""
        return {
            "devices": self.devices,
            "samples": self.samples,
            "precision": self.precision,
            "accumulate": self.accumulate,
            "free_bytes": self.free_nbytes,
            "unknown": self.unknown,
            "left_out": dict(self.left_out),
            "layouts": [
                {
                    "backend": layout.backend,
                    "axes": dict(layout.layout.axes),
                    "recomputation": layout.recomputation,
                    "fits": layout.memory.fits,
                    "memory": layout.memory.to_dict(),
                    "start": self._start(layout),
                }
                for layout in self.layouts
            ],
        }


# -- The table of a job -----------------------------------------------------------------------------


@explain_arguments("estimate(model, optimizer, batch, step)")
def estimate(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    batch: Any = None,
    step: Step | None = None,
    *,
    devices: int = 1,
    memory: int | str | None = None,
    samples: int | None = None,
    precision: Precision = "fp32",
    accumulate: int = 1,
) -> LayoutTable:
    """Return the layouts of training on some CUDA devices, which need not exist here, by their memory.

    These are the layouts of every installed backend: for each of its axes the first options that fit, with
    as little as possible computed again in the backward pass. No weights are loaded and nothing is computed:
    a step runs on tensors without memory. What a trainer of this program needs on its own devices, with its
    options, :meth:`tp_trainer.Trainer.estimate` says.

    Args:
        model: The plain model; it may be on the meta device.
        optimizer: Its optimizer. Without it, two values per parameter are assumed, as for Adam.
        batch: A batch of one device. Without it the activations are unknown.
        step: As for :meth:`tp_trainer.Trainer.fit`.
        devices: The number of devices.
        memory: The free memory of each: bytes, or text such as "80GiB"; by default it is unknown.
        samples: The samples of the batch: its first ones, repeated if needed; by default all.
        precision: As of the trainer.
        accumulate: The batches of one optimizer step.

    Raises:
        ConfigError: An argument has a wrong value.

    Example:
        >>> print(estimate(torch.nn.Linear(4, 4), devices=8, memory="80GiB"))  # doctest: +SKIP
    """
    check_model("estimate()", model)
    check_known("estimate()", model, optimizer, step)
    check_positive("devices", devices)
    if samples is not None:
        check_positive("samples", samples)
    rows = row_count_of(batch)
    each = None if rows is None else samples or rows
    free_nbytes = parse_nbytes(memory) if isinstance(memory, str) else memory
    job = Job(
        devices=(torch.device(EXAMPLE, 0),),
        environment=LaunchEnvironment(),
        model=model,
        precision=precision,
        accumulate=accumulate,
        free_nbytes=free_nbytes,
        recomputation="nothing",
    )
    footprints = StepFootprints(model, optimizer, batch, step, precision, job.devices[0])
    first = footprints.measure(each or 1, "nothing")
    by_layout, left_out = _list_candidates(replace(job, footprint=first), registry.backends(), devices, each)
    recomputed: list[Recomputation] = ["nothing"] if first.activations is None else recomputations(model)
    layouts: list[LayoutNeed] = []
    for candidates in by_layout:
        name = candidates[0].backend.name
        try:
            need = _first_that_fits(candidates, footprints, recomputed)
        except Exception as error:  # noqa: BLE001 - a plugin may raise anything
            left_out[name] = f"its estimate raised {type(error).__name__}: {error}"
            continue
        if need is None:
            left_out[name] = "it estimates no memory"
        else:
            layouts.append(need)
    return LayoutTable(
        layouts=tuple(sorted(layouts, key=lambda need: (not need.memory.fits, need.memory.taken))),
        left_out=left_out,
        devices=devices,
        samples=each,
        precision=precision,
        accumulate=accumulate,
        free_nbytes=job.free_nbytes,
        unknown=first.unknown or footprints.unknown,
    )


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A layout of a backend, the job of one of its ranks, and the samples that one of its readers gets."""

    backend: Backend[Any]
    layout: Layout
    job: Job
    samples: int | None


def _list_candidates(
    job: Job, backends: Iterable[Contribution[Backend[Any]]], devices: int, samples: int | None
) -> tuple[list[list[_Candidate]], dict[str, str]]:
    """Return the layouts of all backends that can take the job, and the reasons why others have none.

    Layouts of a backend that differ in options alone are together, in the backend's order.
    """
    names = tuple(torch.device(EXAMPLE, i) for i in range(devices))
    jobs = [replace(job, environment=LaunchEnvironment(), devices=names)]
    if devices > 1:
        processes = LaunchEnvironment(world_size=devices, local_world_size=devices)
        jobs.insert(0, replace(job, environment=processes, devices=names[:1]))
    batch = None if samples is None else samples * devices
    rows: dict[tuple[str, str], list[_Candidate]] = {}
    left_out: dict[str, str] = {}
    backend_names: set[str] = set()
    for contribution in backends:
        backend = contribution.item
        backend_names.add(backend.name)
        fitting: list[_Candidate] = []
        reasons: list[str] = []
        for of_rank in jobs:
            try:
                for layout in backend.layouts(of_rank):
                    candidate = _candidate(backend, layout, of_rank, batch)
                    reason = _refusal(candidate)
                    if reason:
                        reasons.append(reason)
                    else:
                        fitting.append(candidate)
            except (ConfigError, ModelError) as error:
                reasons.append(str(error))
            except Exception as error:  # noqa: BLE001 - a plugin may raise anything
                reasons.append(f"its layouts raised {type(error).__name__}: {error}")
        for candidate in fitting:
            key = (_backends_of(backend.name, candidate.layout), _name_of(candidate.layout))
            rows.setdefault(key, []).append(candidate)
        if not fitting:
            if reasons:
                left_out[backend.name] = reasons[0]
            else:
                left_out[backend.name] = _reason_of_none(backend, jobs[0])
    missing = [name for name in _SPLITTING if name not in backend_names]
    left_out |= {name: f"it is not installed: pip install {KNOWN_BACKENDS[name]}" for name in missing}
    return list(rows.values()), left_out


def _candidate(backend: Backend[Any], layout: Layout, job: Job, batch: int | None) -> _Candidate:
    # One process has a device for each of its ranks; a process of several has one.
    devices = job.devices[: layout.ranks]
    of_layout = replace(job, devices=devices, options={**job.options, **layout.options})
    share = None if batch is None else batch // layout.readers
    return _Candidate(backend, layout, of_layout, share)


def _refusal(candidate: _Candidate) -> str:
    """Return why a layout cannot take its samples, or this model; empty if it can."""
    layout, job, samples = candidate.layout, candidate.job, candidate.samples
    if samples is not None and samples % layout.microbatches:
        return f"{samples} samples do not divide into {layout.microbatches} micro-batches"
    if layout.setup:  # which makes of the plain model what the backend takes
        return ""
    verdict = candidate.backend.assess(replace(job, footprint=None))
    if verdict.is_fit:
        return ""
    if verdict.remedy:
        return f"{verdict.reason}; {verdict.remedy}"
    return verdict.reason


def _reason_of_none(backend: Backend[Any], job: Job) -> str:
    verdict = backend.assess(job)
    if verdict.is_fit:
        return f"it has no layout on {job.environment.world_size} ranks"
    return verdict.reason


def _first_that_fits(
    candidates: Sequence[_Candidate], footprints: StepFootprints, recomputed: Sequence[Recomputation]
) -> LayoutNeed | None:
    """Return the first candidate that fits, with the least recomputation; else the one that lacks least."""
    needs: list[LayoutNeed] = []
    for recomputation in recomputed:
        for candidate in candidates:
            need = _need(candidate, footprints, recomputation)
            if need is None:
                continue
            if need.memory.fits:
                return need
            needs.append(need)
    return min(needs, key=lambda need: need.memory.taken, default=None)


def _need(
    candidate: _Candidate, footprints: StepFootprints, recomputation: Recomputation
) -> LayoutNeed | None:
    layout, job = candidate.layout, candidate.job
    footprint = footprints.measure(candidate.samples or 1, recomputation)
    if (
        recomputation != "nothing" and footprint.activations is None
    ):  # such a step cannot be run without memory
        return None
    if candidate.samples is not None:
        # Ranks that read the same samples have a part of them each.
        footprint = replace(footprint, part=layout.readers / layout.ranks)
    memory = candidate.backend.estimate_memory(replace(job, footprint=footprint, recomputation=recomputation))
    if memory is None:
        return None
    return LayoutNeed(
        backend=candidate.backend.name,
        layout=layout,
        is_launched=job.environment.world_size > 1,
        recomputation=recomputation,
        memory=memory,
    )
