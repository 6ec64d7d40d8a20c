"""``tp verify`` without a program: a small training on every installed backend, and by hand on one device."""

import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.device_types import wide_float
from tp_core.discovery import Contribution
from tp_core.messages import check_installed
from tp_core.plugins import Backend, Job, Verdict, registry

from tp_verify._preload import preloading
from tp_verify._report import VerifyReport
from tp_verify._script_runs import AT_ONCE, ScriptRun, Trials, check_trained, compare_runs
from tp_verify._small_training import STEPS, train_by_hand

_SCRIPT = Path(__file__).parent / "scripts" / "small.py"
_WHOLE = "whole"  # the run on one device, which saves what the model gets
_CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class BackendReport(VerifyReport):
    """The result of one backend, on some devices of this host.

    Attributes:
        backend: Its name.
        origin: Its distribution and version.
        layout: The processes and their devices; empty where it fits none.
    """

    backend: str = ""
    origin: str = ""
    layout: str = ""


@dataclass(frozen=True, slots=True)
class BackendTrial:
    """A backend, and where it is tried.

    Attributes:
        backend: Its name.
        origin: Its distribution and version.
        ranks: The number of processes.
        devices: The devices of the only process, or one for each.
        unfit: The reason for which it is not tried; empty if it is.
    """

    backend: str
    origin: str
    ranks: int = 1
    devices: tuple[torch.device, ...] = ()
    unfit: str = ""

    @property
    def is_reference(self) -> bool:
        """Whether it is the run with which the others are compared."""
        return (self.backend, self.devices) == ("single", (_CPU,))

    @property
    def dtype(self) -> torch.dtype:
        """The type of the training, as ``scripts/small.py`` chooses it: the widest that all devices have."""
        return wide_float(*self.devices)

    @property
    def layout(self) -> str:
        """The processes and their devices, in words."""
        names = [str(device) for device in self.devices]
        if self.ranks > 1:
            return f"{self.ranks} processes ({', '.join(dict.fromkeys(names))})"
        if names:
            return f"one process ({', '.join(names)})"
        return ""

    def report(self, report: VerifyReport) -> BackendReport:
        """Return a report with what it is of."""
        values = {field.name: getattr(report, field.name) for field in fields(VerifyReport)}
        values["name"] = f"backend {self.backend} of {self.origin}"
        values["dtype"] = str(self.dtype).removeprefix("torch.")
        return BackendReport(**values, backend=self.backend, origin=self.origin, layout=self.layout)


def verify_backends(*, ranks: int, timeout_s: float) -> list[BackendReport]:
    """Train on every installed backend, wherever on this host it fits; return a report for each trial.

    Args:
        ranks: How many processes where there are several on the CPU.
        timeout_s: The deadline of each training.

    Raises:
        ConfigError: tp-trainer is not installed, or does not train on one device.
    """
    check_installed("tp_trainer", by="tp verify without a program", extra="tp-trainer")
    trials = list(find_trials(registry.backends(), ranks=ranks))
    with (
        tempfile.TemporaryDirectory(prefix="tp-verify-") as folder,
        preloading(_SCRIPT),
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        runs = Trials(_SCRIPT, [], Path(folder), STEPS, timeout_s, example=_WHOLE)
        whole = check_trained(runs.run(_WHOLE), _SCRIPT)
        pushed = pool.submit(runs.run, "nudged", nudge=1)
        others = {
            trial: pool.submit(
                runs.run, f"trial {number}", trial.backend, ranks=trial.ranks, devices=trial.devices
            )
            for number, trial in enumerate(trials)
            if not trial.unfit and not trial.is_reference
        }
        near = check_trained(pushed.result(), _SCRIPT)
        reports = []
        for trial in trials:
            if trial.unfit:
                report = VerifyReport("", 1, "", None, {}, [], [trial.unfit])
            elif trial.is_reference:
                by_hand = ScriptRun([train_by_hand()])
                report = compare_runs(by_hand, near, whole, trial.backend, 1, STEPS, computed=[trial.dtype])
            else:
                other = others[trial].result()
                report = compare_runs(
                    whole, near, other, trial.backend, trial.ranks, STEPS, computed=[trial.dtype]
                )
            reports.append(trial.report(report))
    return reports


def find_trials(backends: Iterable[Contribution[Backend[Any]]], *, ranks: int) -> Iterator[BackendTrial]:
    """Yield each place of this host that a backend fits; of one that fits none, the reasons."""
    layouts = list(dict.fromkeys(_layouts(ranks)))
    for contribution in backends:
        backend = contribution.item
        origin = f"{contribution.distribution} {contribution.version}".rstrip()
        verdicts = [_assess(backend, processes, devices) for processes, devices in layouts]
        for (processes, devices), verdict in zip(layouts, verdicts, strict=True):
            if verdict.is_fit:
                yield BackendTrial(backend.name, origin, processes, devices)
        if not any(verdict.is_fit for verdict in verdicts):
            reasons = dict.fromkeys(verdict.reason for verdict in verdicts)
            yield BackendTrial(backend.name, origin, unfit="; or ".join(reasons))


def _layouts(ranks: int) -> Iterator[tuple[int, tuple[torch.device, ...]]]:
    """Yield processes and devices: the CPU and the accelerators, alone, in one process, one for each rank."""
    yield 1, (_CPU,)
    yield 1, (_CPU, _CPU)
    yield ranks, (_CPU,) * ranks
    accelerators = tuple(device for device in resolve_devices("auto") if device.type != "cpu")
    if accelerators:
        yield 1, accelerators[:1]
    if len(accelerators) > 1:
        yield 1, accelerators
        yield len(accelerators), accelerators


def _assess(backend: Backend[Any], processes: int, devices: tuple[torch.device, ...]) -> Verdict:
    job = Job(
        devices=devices if processes == 1 else devices[:1],
        environment=LaunchEnvironment(world_size=processes, local_world_size=processes),
        explicit_devices=True,
        options={backend.name: backend.self_test_options},
    )
    try:
        return backend.assess(job)
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return Verdict.unfit(f"its assessment raised {type(error).__name__}: {error}")


def as_table(reports: Sequence[BackendReport]) -> str:
    """Return one line for each report: where it ran, how long, and that it is equal or what differs first."""
    rows = [("backend", "from", "layout", "seconds", "result")]
    for report in reports:
        seconds = f"{report.seconds:.1f}" if report.seconds else ""
        rows.append((report.backend, report.origin, report.layout, seconds, _result(report)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)][:-1]
    lines = []
    for *cells, result in rows:
        padded = [cell.ljust(width) for cell, width in zip(cells, widths, strict=True)]
        lines.append("  ".join([*padded, result]))
    return "\n".join(lines)


def _result(report: BackendReport) -> str:
    if report.finding is not None:
        return str(report.finding)
    if report.compared:
        return "equal"
    return f"not tried: {'; '.join(report.not_covered)}"
