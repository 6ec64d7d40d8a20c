"""The layouts of a job on a machine, ranked by the time of a step: ``tp plan``."""

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, get_args

import torch
from torch import nn
from torch.optim import Optimizer
from tp_core import LaunchEnvironment, tree_map
from tp_core.discovery import Contribution
from tp_core.errors import ConfigError, ModelError
from tp_core.internal import KNOWN_BACKENDS, unchanged_models
from tp_core.jobs import Axis, Layout, MemoryNeed, Precision, Recomputation, StepWork
from tp_core.plugins import Backend, Job, registry

from tp_trainer._activations import recomputations
from tp_trainer._checks import check_known, check_model, check_positive
from tp_trainer._memory import parse_nbytes, row_count_of
from tp_trainer._steps._step import Step
from tp_trainer.planning._lines import start_lines
from tp_trainer.planning._machine import Links, Machine, busy_part
from tp_trainer.planning._samples import Measured, Subject, with_length

log = logging.getLogger("tp_trainer")

_GB = 2**30
_SPLITTING = ("context", "pipeline", "shard")
"""Backends in packages of their own: a plan names their layouts where they are missing."""


@dataclass(frozen=True, slots=True)
class StepTime:
    """The seconds of an optimizer step, by part.

    Attributes:
        compute: Forward and backward passes.
        update: The optimizer.
        exposed: Collectives that no operator hides.
        bubble: Waiting for other stages.
        hidden: Collectives that run beside operators, which take no time of their own.
    """

    compute: float
    update: float
    exposed: float
    bubble: float
    hidden: float

    @property
    def total(self) -> float:
        """The seconds of a step."""
        return self.compute + self.update + self.exposed + self.bubble


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedLayout:
    """A layout with what it needs.

    Attributes:
        backend: The backend's name.
        layout: Its axes and options.
        accumulate: The batches of an optimizer step.
        recomputation: What the backward pass computes again.
        memory: The memory of the fullest rank.
        time: The seconds of a step.
    """

    backend: str
    layout: Layout
    accumulate: int
    recomputation: Recomputation
    memory: MemoryNeed
    time: StepTime

    @property
    def lacks(self) -> int:
        """The bytes that a device lacks; 0 where the job fits."""
        return 0 if self.memory.free is None else max(0, self.memory.total - self.memory.free)

    @property
    def name(self) -> str:
        """The axes with more than one rank, and how it differs from others of the same axes."""
        axes = [f"{a} {n}" for a in get_args(Axis) if (n := self.layout.axes.get(a, 1)) > 1]
        options = next((o for o in self.layout.options.values() if "schedule" in o), {})
        more = [str(options[key]) for key in ("schedule", "microbatches") if key in options]
        fsdp = next((o for o in self.layout.options.values() if "reshard_after_forward" in o), None)
        data = self.layout.options.get("shard", {}).get("data")
        again = fsdp["reshard_after_forward"] if fsdp else getattr(data, "reshard_after_forward", None)
        if again is not None:
            more.append("gathered twice" if again else "gathered once")
        return ", ".join([" x ".join(axes) or "one device", *more])

    def to_dict(self) -> dict[str, Any]:
        """Return it as values for JSON."""
        return {
            "backend": self.backend,
            "layout": self.name,
            "axes": dict(self.layout.axes),
            "accumulate": self.accumulate,
            "recomputation": self.recomputation,
            "fits": not self.lacks,
            "lacks_bytes": self.lacks,
            "memory": self.memory.to_dict(),
            "seconds": {name: getattr(self.time, name) for name in (*StepTime.__slots__, "total")},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The layouts of a job, the fastest that fits first; ``str()`` returns a table.

    Attributes:
        layouts: Each layout with the fastest way in which it fits, else the one that lacks least.
        left_out: Why a backend, or some of its layouts, cannot be compared, by the backend's name.
        devices: The number of devices.
        samples: The samples of an optimizer step.
        tokens: The tokens of a sample; 0 where samples have none.
        machine: The rates.
        links: The links.
        precision: As of the trainer.
        unknown: The reason why something is not known; empty if all is.
    """

    layouts: tuple[PlannedLayout, ...]
    left_out: Mapping[str, str]
    devices: int
    samples: int
    tokens: int
    machine: Machine
    links: Links
    precision: Precision
    unknown: str = ""

    @property
    def best(self) -> PlannedLayout | None:
        """The fastest layout that fits; ``None`` if none does."""
        return next((found for found in self.layouts if not found.lacks), None)

    def start(self, found: PlannedLayout) -> str:
        """Return the lines that start a layout."""
        return start_lines(
            found.backend,
            found.layout,
            accumulate=found.accumulate,
            recomputation=found.recomputation,
            precision=self.precision,
            samples=self.samples // found.accumulate,
            hosts=-(-self.devices // self.links.devices),
        )

    def __str__(self) -> str:
        return self.table(rows=12)

    def table(self, *, rows: int) -> str:
        """Return a table of the first rows of those that fit, and of those that do not."""
        of_tokens = f" of {self.tokens} tokens" if self.tokens else ""
        what = f"{self.samples} samples{of_tokens} in a step, {self.precision}"
        each = f"{'tokens' if self.tokens else 'samples'}/s of one device"
        lines = [f"{self.devices} devices, {what}; rates {self.machine.source}; {each}"]
        fitting = [found for found in self.layouts if not found.lacks]
        lacking = [found for found in self.layouts if found.lacks]
        lines += _rows(fitting[:rows], self)
        if lacking:
            lines += ["", f"{len(lacking)} do not fit:"]
            lines += [
                f"  {found.name} ({found.backend}): lacks {found.lacks / _GB:.1f} GiB, {found.memory}"
                for found in lacking[: max(3, rows // 3)]
            ]
        if self.best is not None:
            lines += [
                "",
                "to start the first:",
                *(f"  {line}" for line in self.start(self.best).splitlines()),
            ]
        lines += [f"not compared: {name}: {why}" for name, why in self.left_out.items()]
        if self.unknown:
            lines.append(f"not known: {self.unknown}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as values for JSON."""
        return {
            "devices": self.devices,
            "samples": self.samples,
            "tokens": self.tokens,
            "precision": self.precision,
            "rates": self.machine.source,
            "left_out": dict(self.left_out),
            "unknown": self.unknown,
            "layouts": [found.to_dict() | {"start": self.start(found)} for found in self.layouts],
        }


def plan(
    model: nn.Module,
    optimizer: Optimizer | None = None,
    batch: Any = None,
    step: Step | None = None,
    *,
    devices: int,
    links: Links | str | None = None,
    memory: int | str | None = None,
    samples: int | None = None,
    length: int | None = None,
    precision: Precision = "fp32",
    machine: Machine | None = None,
    backends: Iterable[Contribution[Backend[Any]]] | None = None,
) -> Plan:
    """Return the layouts of a job on some devices, which need not exist here, ranked by the time of a step.

    No weights are loaded, and nothing is computed: a step runs on tensors without memory.

    Args:
        model: The plain model; it may be on the meta device.
        optimizer: Its optimizer. Without it, two values per parameter are assumed, as for Adam.
        batch: A batch, of any number of samples.
        step: As for :meth:`tp_trainer.Trainer.fit`.
        devices: The number of devices, of which each gets a process.
        links: How they are connected: ``"node=8x450GB/s,between=50GB/s"``.
        memory: The free memory of each: bytes, or text such as "80GiB"; by default it is unknown.
        samples: The samples of an optimizer step, of all devices; by default those of the batch.
        length: The tokens of a sample; by default those of the batch.
        precision: As of the trainer.
        machine: The rates of a device; by default those of an H100, roughly.
        backends: The backends; by default the installed ones.

    Raises:
        ConfigError: An argument has a wrong value; links, a batch or a step are missing; or no layout has
            a whole number of samples for each of its readers.
    """
    check_model("plan()", model)
    check_known("plan()", model, optimizer, step)
    check_positive("devices", devices)
    links = _links(links, devices)
    rows = row_count_of(batch)
    if rows is None or step is None:
        msg = "plan() needs a batch and a step: plan(model, optimizer, batch, step, devices=...)"
        raise ConfigError(msg)
    samples = rows if samples is None else samples
    check_positive("samples", samples)
    if length is not None:
        check_positive("length", length)
        batch = with_length(batch, length)
    machine = machine or Machine()
    job = Job(
        devices=(torch.device("cuda", 0) if machine.is_ahead else torch.device("cpu"),),
        environment=LaunchEnvironment(world_size=devices, local_world_size=min(devices, links.devices)),
        model=model,
        precision=precision,
        free_nbytes=parse_nbytes(memory) if isinstance(memory, str) else memory,
        recomputation="nothing",
    )
    ways, left_out = _ways(job, registry.backends() if backends is None else backends, samples)
    if not ways:
        reasons = "; ".join(f"{name}: {why}" for name, why in left_out.items())
        msg = f"no layout of {samples} samples on {devices} devices can be compared: {reasons}"
        raise ConfigError(msg)
    subject = Subject(model, optimizer, batch, step, precision, job.devices[0])
    sizes = {samples // way.layout.readers // a for way in ways for a in way.accumulations}
    measured = subject.measure_all(sizes, recomputations(model))
    unknown = next((m.footprint.unknown for m in measured.values() if m.footprint.unknown), "")
    measured = {key: m for key, m in measured.items() if m.footprint.activations is not None}
    with unchanged_models():
        found = [p for way in ways if (p := _best(job, way, samples, measured, machine, links)) is not None]
    silent = {way.backend.name for way in ways} - {p.backend for p in found}
    left_out |= dict.fromkeys(sorted(silent), unknown or "it has no forecast for this model")
    return Plan(
        layouts=tuple(sorted(found, key=_order)),
        left_out=left_out,
        devices=devices,
        samples=samples,
        tokens=_tokens_of(batch),
        machine=machine,
        links=links,
        precision=precision,
        unknown=unknown,
    )


def _links(links: Links | str | None, devices: int) -> Links:
    if links is None and devices > 1:
        msg = (
            f"links are not given, and {devices} devices exchange gradients over them: --links "
            "node=8x450GB/s,between=50GB/s, or links= in plan()"
        )
        raise ConfigError(msg)
    found = Links.parse(links) if isinstance(links, str) else links or Links(1, 1e12, 1e12)
    if devices > found.devices and devices % found.devices:
        msg = (
            f"{devices} devices do not fill hosts of {found.devices}: give a multiple of {found.devices}, or "
            "other links"
        )
        raise ConfigError(msg)
    return found


# -- The ways of a job ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Way:
    """A layout of a backend, and the numbers of batches in a step that divide its samples."""

    backend: Backend[Any]
    layout: Layout
    accumulations: tuple[int, ...]


def _ways(
    job: Job, backends: Iterable[Contribution[Backend[Any]]], samples: int
) -> tuple[list[_Way], dict[str, str]]:
    """Return the ways in which the samples divide, and the reasons why backends have none."""
    found: list[_Way] = []
    left_out: dict[str, str] = {}
    backends = list(backends)
    for contribution in backends:
        backend = contribution.item
        try:
            layouts = list(backend.layouts(job))
        except (ConfigError, ModelError) as error:
            left_out[backend.name] = str(error)
            continue
        ways = [_Way(backend, layout, _accumulations(layout, samples)) for layout in layouts]
        found += [way for way in ways if way.accumulations]
        if layouts and not any(way.accumulations for way in ways):
            left_out[backend.name] = f"{samples} samples do not divide among the readers of its layouts"
    asked = {contribution.item.name for contribution in backends}
    left_out |= {
        n: f"it is not installed: pip install {KNOWN_BACKENDS[n]}" for n in _SPLITTING if n not in asked
    }
    return found, left_out


def _accumulations(layout: Layout, samples: int) -> tuple[int, ...]:
    if samples % layout.readers:
        return ()
    each = samples // layout.readers
    given = [options.get("microbatches") for options in layout.options.values()]
    least = next((parts for parts in given if isinstance(parts, int)), 1)
    return tuple(2**i for i in range(each.bit_length()) if each % 2**i == 0 and each // 2**i % least == 0)


def _best(
    job: Job,
    way: _Way,
    samples: int,
    measured: Mapping[tuple[int, Recomputation], Measured],
    machine: Machine,
    links: Links,
) -> PlannedLayout | None:
    """Return the fastest way in which a layout fits, else the one that lacks least."""
    found: list[PlannedLayout] = []
    for what in dict.fromkeys(key[1] for key in measured):
        planned = _fewest_batches(job, way, what, samples, measured, machine, links)
        if planned is not None:
            found.append(planned)
            if not planned.lacks and planned.accumulate == 1:
                break  # what computes more again is slower
    return min(found, key=_order, default=None)


def _fewest_batches(
    job: Job,
    way: _Way,
    what: Recomputation,
    samples: int,
    measured: Mapping[tuple[int, Recomputation], Measured],
    machine: Machine,
    links: Links,
) -> PlannedLayout | None:
    """Return the way with the fewest batches in a step that fits, which is the fastest, else the last one."""

    def planned(accumulate: int) -> PlannedLayout | None:
        needed = measured.get((samples // way.layout.readers // accumulate, what))
        return None if needed is None else _planned(job, way, accumulate, what, needed, machine, links)

    first, *others = way.accumulations
    found = planned(first)
    if found is None or not found.lacks or not others:
        return found
    # More batches need less, but that several of them keep whole gradients: so not from the first one on.
    last = planned(others[-1])
    if last is None or last.lacks:
        return min(found, last or found, key=_order)
    found = last
    low, high = 0, len(others) - 1
    while low < high:
        middle = (low + high) // 2
        between = planned(others[middle])
        if between is None or between.lacks:
            low = middle + 1
        else:
            found, high = between, middle
    return found


def _planned(
    job: Job,
    way: _Way,
    accumulate: int,
    what: Recomputation,
    needed: Measured,
    machine: Machine,
    links: Links,
) -> PlannedLayout | None:
    options = {**job.options, **way.layout.options}
    job = replace(job, options=options, accumulate=accumulate, footprint=needed.footprint, recomputation=what)
    forecast = way.backend.forecast(job, way.layout)
    if forecast is None:
        return None
    trained = forecast.memory.gradients / max(1, needed.footprint.gradients)
    return PlannedLayout(
        backend=way.backend.name,
        layout=way.layout,
        accumulate=accumulate,
        recomputation=what,
        memory=forecast.memory,
        time=time_of(needed, forecast.work, accumulate, machine, links, trained=trained),
    )


def _order(found: PlannedLayout) -> tuple[int, float, str]:
    return found.lacks, found.time.total, found.name


def _tokens_of(batch: Any) -> int:
    sizes: list[int] = []
    tree_map(
        lambda leaf: (
            sizes.append(leaf.shape[1])
            if isinstance(leaf, torch.Tensor) and leaf.dim() == 2 and not leaf.is_floating_point()
            else None
        ),
        batch,
    )
    return sizes[0] if sizes else 0


# -- Time -------------------------------------------------------------------------------------------


def time_of(
    needed: Measured, work: StepWork, accumulate: int, machine: Machine, links: Links, *, trained: float
) -> StepTime:
    """Return the seconds of an optimizer step.

    Args:
        needed: The operators of a device with the whole model, for the samples of one reader.
        work: What a rank does of it.
        accumulate: The batches of the step.
        machine: The rates.
        links: The links.
        trained: The part of the trained weights that the rank updates.
    """
    once = {"part": work.operations, "starts": work.starts}
    forward = machine.seconds_of(needed.forward, "forward", **once)
    backward = machine.seconds_of(needed.backward, "backward", **once)
    exposed = hidden = 0.0
    for is_last, times in ((True, 1), (False, accumulate - 1)):
        shown, beside = _exposed(work, {"forward": forward, "backward": backward}, machine, links, is_last)
        exposed, hidden = exposed + times * shown, hidden + times * beside
    # Each piece after the first adds its gradients: two are read, and one is written.
    pieces = accumulate * work.starts / max(work.operations, 1e-9)
    sums = 3 * trained * needed.footprint.gradients * max(0.0, pieces - 1) / machine.bandwidth
    compute = accumulate * (forward + backward) + sums
    update = machine.seconds_of(needed.update, "update", part=trained)
    if work.is_sharded:
        update += machine.dtensor_s * float(needed.update.times.sum())
    busy, bubble = _with_bubble(compute, work.together, machine.crowding)
    return StepTime(compute=busy, update=update, exposed=exposed, bubble=bubble, hidden=hidden)


def _with_bubble(compute: float, together: Sequence[float], crowding: float) -> tuple[float, float]:
    """Return the seconds for which a device is busy, and those for which it waits for other stages.

    Ranks that share cores compute faster while others wait: then all of them are as fast as their mean.

    Example:
        >>> _with_bubble(8.0, (2.0, 0.0, 0.0, 0.75), 2.0)  # two ranks for a core
        (10.0, 4.0)
    """
    if not together:
        return compute, 0.0
    alone, crowd = compute / crowding, crowding / len(together)
    whole = alone * sum(part * max(1.0, n * crowd) for n, part in enumerate(together, 1))
    busy = alone * max(1.0, crowd * sum(n * part for n, part in enumerate(together, 1)))
    return busy, max(0.0, whole - busy)


def _exposed(
    work: StepWork, passes: Mapping[str, float], machine: Machine, links: Links, is_last: bool
) -> tuple[float, float]:
    """Return the seconds of collectives for a batch that nothing hides, and those beside operators."""
    exposed = hidden = 0.0
    for phase in ("forward", "backward", ""):
        mine = [t for t in work.transfers if t.hidden_by == phase and (is_last or not t.per_step)]
        each = [machine.seconds_for(t, links) for t in mine]
        total = sum(t.times * s for t, s in zip(mine, each, strict=True))
        busy = sum(t.times * s * busy_part(machine, t) for t, s in zip(mine, each, strict=True))
        # The first unit is gathered before anything runs, and the last one reduced after it.
        shown = max([total - machine.overlap * passes.get(phase, 0.0), busy, *each, 0.0]) if mine else 0.0
        exposed, hidden = exposed + shown, hidden + total - shown
    return exposed, hidden


# -- The table --------------------------------------------------------------------------------------


def _rows(found: Iterable[PlannedLayout], plan: Plan) -> Iterator[str]:
    head = ("", "layout", "backend", "batches", "again", "step", "compute", "exposed", "bubble", "GiB")
    parts = ("weights", "grads", "optim", "comm", "activations", "tokens/s" if plan.tokens else "samples/s")
    table: list[tuple[str, ...]] = [(*head, *parts)]
    for number, row in enumerate(found, 1):
        need, time = row.memory, row.time
        rate = plan.samples * max(1, plan.tokens) / time.total / plan.devices
        sizes = (need.total, need.weights, need.gradients, need.optimizer, need.communication)
        table.append(
            (
                str(number),
                row.name,
                row.backend,
                str(row.accumulate),
                row.recomputation,
                _seconds(time.total),
                _seconds(time.compute + time.update),
                _seconds(time.exposed),
                _seconds(time.bubble),
                *(_gib(n) for n in (*sizes, need.activations or 0)),
                f"{rate:,.0f}",
            )
        )
    if len(table) == 1:
        yield "none fits"
        return
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for cells in table:
        aligned = [c.ljust(w) for c, w in zip(cells[:5], widths[:5], strict=True)]
        aligned += [c.rjust(w) for c, w in zip(cells[5:], widths[5:], strict=True)]
        yield "  ".join(aligned).rstrip()


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.1f} ms"


def _gib(nbytes: int) -> str:
    return f"{nbytes / _GB:.1f}" if nbytes >= _GB else f"{nbytes / _GB:.3f}"
