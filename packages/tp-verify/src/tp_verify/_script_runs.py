"""``tp verify SCRIPT``: a script of tp trains whole, stopped and resumed, and on each backend that fits."""

import json
import os
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tp_core import LaunchEnvironment
from tp_core.compare import SLACK, Bound, difference_in_words, norm_of, relative_error
from tp_core.errors import ConfigError
from tp_core.plugins import Backend, Job, registry
from tp_core.ranks import RankOutcome, rank_outcomes
from tp_core.state import open_tensors

from tp_verify._preload import preloading
from tp_verify._report import Finding, VerifyReport
from tp_verify._script_recorder import INPUTS, MOST_STEPS, run_script, steps_beyond

_SAVED = 128 + 15  # the exit status of a run that a SIGTERM has ended
AT_ONCE = 2  # runs at the same time
_CPU = torch.device("cpu")
_COMPUTED = (torch.float32,)
"""What a script's model may compute in, whatever the type of its weights: a norm layer in float32, say."""
# A rounding mostly grows little, but much where it turns the largest of a pool or the sign before a ReLU. One
# run often meets none of these.
_NUDGES = (1, 2, 3)


@dataclass(frozen=True)
class ScriptRun:
    """A run of the script, and what its ranks have recorded.

    Attributes:
        records: The record of each rank.
        saved: The tensors of the last checkpoint, whole.
        failed: The reason for which it did not train to its end; may be empty.
        is_refused: Whether tp refused to begin it, as the backend does not fit the script.
        seconds: The time that it took.
        stop_s: The time from the SIGTERM to its end.
    """

    records: Sequence[dict[str, Any]]
    saved: Mapping[str, Tensor] = field(default_factory=dict)
    failed: str = ""
    is_refused: bool = False
    seconds: float = 0.0
    stop_s: float = 0.0


@dataclass(frozen=True)
class Trials:
    """The runs of one script, each in processes of its own and for a number of optimizer steps.

    Attributes:
        script: The script.
        arguments: Its arguments.
        folder: The folder of all records and checkpoints.
        steps: The optimizer steps of each run; 0 for those that follow from the length of an epoch.
        timeout_s: The deadline of each run.
        example: The name of the run on one device that saves what the model gets, for backends that split it.
    """

    script: Path
    arguments: Sequence[str]
    folder: Path
    steps: int
    timeout_s: float
    example: str = "stopped"

    def run(
        self,
        label: str,
        backend: str = "single",
        *,
        ranks: int = 1,
        devices: Sequence[torch.device] = (_CPU,),
        stops: bool = False,
        resumes: str = "",
        plain: bool = False,
        nudge: int = 0,
    ) -> ScriptRun:
        """Run the script, and return what its ranks recorded.

        Args:
            label: The name of the run.
            backend: The backend.
            ranks: The number of processes.
            devices: The devices of the only process, or one for each.
            stops: Whether it gets a SIGTERM after two fifths of its steps.
            resumes: The name of the run that it resumes.
            plain: Whether dropout and the statistics of batches are left out.
            nudge: Which of the roundings by which its first weights differ; 0 for none.
        """
        folder = self.folder / label
        folder.mkdir()
        # Also for scripts that save nothing: no run may find the checkpoints of another one.
        saved = self.folder / (resumes or label) / "checkpoints"
        inputs = ""  # for the backend's `adapt_model`, which one device does not call
        if backend != "single":
            inputs = str(self.folder / self.example / INPUTS)
        settings = {
            "folder": str(folder),
            "stops": stops,
            "steps": self.steps,
            "plain": plain,
            "nudge": nudge,
            "inputs": inputs,
        }
        environ = {name: value for name, value in os.environ.items() if name.startswith("TP_")}
        environ |= {
            "TP_VERIFY": json.dumps(settings),
            "TP_BACKEND": backend,
            "TP_DEVICES": ",".join(map(str, devices)),
            "TP_MAX_STEPS": str(self.steps or MOST_STEPS),
            "TP_CHECKPOINT": str(saved),
        }
        began = time.time()
        outcomes = rank_outcomes(
            run_script,
            ranks,
            str(self.script),
            list(self.arguments),
            folder,
            ranks > 1,
            timeout_s=self.timeout_s,
            environ=environ,
            together=True,
        )
        ended = time.time()
        failed = _first_failed(outcomes, _SAVED if stops else 0)
        if failed is not None:
            return _failed_run(failed, folder, self.timeout_s)
        paths = [folder / f"rank{rank}.pt" for rank in range(ranks)]
        if not all(path.is_file() for path in paths):
            return ScriptRun([], failed="it ended, and no trainer's run was seen")
        records = [torch.load(path, weights_only=False) for path in paths]
        stop_s = 0.0
        signaled = folder / "stopped"  # with the time of the signal
        if signaled.is_file():
            stop_s = ended - float(signaled.read_text())
        return ScriptRun(records, _read_newest(saved), seconds=ended - began, stop_s=stop_s)


def verify_script(
    script: Path, arguments: Sequence[str], *, steps: int | None, timeout_s: float
) -> list[VerifyReport]:
    """Verify a script that trains with a `Trainer`; return a report of resuming, and one for each backend.

    Args:
        script: The script.
        arguments: Its arguments.
        steps: The optimizer steps of each run; by default 12, or more where an epoch ends soon after.
        timeout_s: The deadline of each run.

    Raises:
        ConfigError: The script does not train on one device.
    """
    layouts: dict[str, tuple[int, int]] = {}
    for contribution in registry.backends():
        layout = _layout_of(contribution.item)
        if layout is not None:
            layouts[contribution.item.name] = layout
    with (
        tempfile.TemporaryDirectory(prefix="tp-verify-") as folder,
        preloading(script),
        ThreadPoolExecutor(AT_ONCE) as pool,
    ):
        trials = Trials(script, arguments, Path(folder), steps or 0, timeout_s)
        # First the run that is stopped: it sees how long an epoch is, and what the model gets.
        stopped = trials.run("stopped", stops=True)
        seen = {"epoch_steps": 0, "is_drawn": True}
        if stopped.records:
            seen = stopped.records[0]
        trials = replace(trials, steps=steps or steps_beyond(seen["epoch_steps"]))
        whole_run = pool.submit(trials.run, "whole")
        if stopped.failed:
            check_trained(whole_run.result(), script)
        resumed_run = pool.submit(trials.run, "resumed", resumes="stopped")
        # What parts of a batch do otherwise than the whole is left out, where there is any.
        plain_run = whole_run
        if seen["is_drawn"]:
            plain_run = pool.submit(trials.run, "plain", plain=True)
        nudged_runs = [pool.submit(trials.run, f"nudged {n}", plain=True, nudge=n) for n in _NUDGES]
        backend_runs = {}
        for backend, (ranks, devices) in layouts.items():
            backend_runs[backend] = pool.submit(
                trials.run, backend, backend, ranks=ranks, devices=[_CPU] * devices, plain=True
            )
        whole = check_trained(whole_run.result(), script)
        steps = whole.records[0]["step"]
        reports = [_resumed(whole, stopped, resumed_run.result(), steps)]
        plain = check_trained(plain_run.result(), script)
        nudged = [check_trained(run.result(), script) for run in nudged_runs]
        near = max(nudged, key=lambda run: _growth(plain, run))
        for backend, run in backend_runs.items():
            ranks, _ = layouts[backend]
            reports.append(compare_runs(plain, near, run.result(), backend, ranks, steps))
    return reports


def check_trained(run: ScriptRun, script: Path) -> ScriptRun:
    """Return a run on one device, which has to train to its end."""
    if run.failed:
        msg = f"{script} does not train on the backend 'single': {run.failed}"
        raise ConfigError(msg)
    return run


def _layout_of(backend: Backend[Any]) -> tuple[int, int] | None:
    """Return the ranks and the devices of each for a trial on the CPU; ``None`` for one device alone."""
    for ranks, devices in ((1, 2), (2, 1)):
        job = Job(
            devices=(_CPU,) * devices,
            environment=LaunchEnvironment(world_size=ranks, local_world_size=ranks),
            explicit_devices=True,
        )
        if backend.assess(job).is_fit:
            return ranks, devices
    return None


def _read_newest(checkpoints: Path) -> dict[str, Tensor]:
    """Return the tensors of the newest checkpoint; none where none was written."""
    if not checkpoints.is_dir():
        return {}
    stored = open_tensors(max(checkpoints.glob("step-*")))
    tensors = {
        name: torch.empty(info.shape, dtype=info.dtype)
        for name, info in stored.infos.items()
        if name != "optimizer.values"  # bytes: of learning rates and the like
    }
    stored.fill(tensors)
    return tensors


def _first_failed(outcomes: Sequence[RankOutcome], status: int) -> RankOutcome | None:
    """Return the rank that explains most why not all have ended with ``status``."""
    failed = [one for one in outcomes if not one.ok or one.value != status]
    return min(failed, key=lambda one: (one.error is None, one.exitcode in (None, 0)), default=None)


def _failed_run(outcome: RankOutcome, folder: Path, timeout_s: float) -> ScriptRun:
    error = folder / f"error{outcome.rank}.json"
    if error.is_file():
        return ScriptRun([], **json.loads(error.read_text()))
    if outcome.ok:
        output = (folder / f"output{outcome.rank}").read_text(errors="replace")
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        reason = f"it ended with status {outcome.value}"
        if lines:
            reason = f"{reason}: {lines[-1]}"
        return ScriptRun([], failed=reason)
    if outcome.exitcode in (None, -9):  # killed by the parent
        return ScriptRun([], failed=f"it had not ended after {timeout_s:g} s")
    return ScriptRun([], failed=str(outcome))


def _resumed(whole: ScriptRun, stopped: ScriptRun, resumed: ScriptRun, steps: int) -> VerifyReport:
    """Compare a run that was stopped and resumed with one that was not: bit for bit."""
    name = "stopped by SIGTERM and resumed"
    finding = None
    if stopped.failed or resumed.failed:
        finding = Finding("the run", "", 0, stopped.failed or resumed.failed)
        return VerifyReport(name, 1, "its own", finding, {}, [], [])
    first, second = whole.records[0], resumed.records[0]
    before_stop = stopped.records[0]
    compared: dict[str, int] = {}
    rows = before_stop["rows"] + second["rows"]
    if len(first["rows"]) != len(rows):
        difference = f"{len(rows)} batches were seen, and {len(first['rows'])} without a stop"
        finding = Finding("the order of samples", "", 0, difference)
    norms = before_stop["norms"] | second["norms"]
    finding = (
        _first_batch_apart(first["rows"], [rows], compared)
        or finding
        or _first_step_apart(first["norms"], norms)
        or _first_apart(first, second, compared)
        or _first_saved_apart(whole, resumed, steps, compared)
    )
    drawn = [kind for kind, state in first["random"].items() if state != second["random"].get(kind)]
    if finding is None and drawn:
        difference = f"the generator of {' and of '.join(drawn)} is in another state"
        finding = Finding("the random numbers", "", steps, difference)
    at = before_stop["step"]
    kinds = "weights, optimizer state, buffers, metrics and random numbers"
    not_covered = ["the order of samples: the model takes no tensor"]
    if rows:
        kinds = "weights, optimizer state, buffers, metrics, order of samples and random numbers"
        not_covered = []
    proven = []
    if finding is None:
        proven = [
            f"{steps} steps, of which a SIGTERM ended the run after {at}, in {stopped.stop_s:.1f} s",
            f"{kinds}, bit for bit",
        ]
    return VerifyReport(
        name,
        1,
        "its own",
        finding,
        compared,
        proven,
        not_covered,
        seconds=whole.seconds + stopped.seconds + resumed.seconds,
    )


def compare_runs(
    plain: ScriptRun,
    near: ScriptRun,
    other: ScriptRun,
    backend: str,
    ranks: int,
    steps: int,
    *,
    computed: Sequence[torch.dtype] = _COMPUTED,
) -> VerifyReport:
    """Compare a run on another backend with the one on one device, up to rounding.

    How far a rounding can grow in this training is what ``near`` has: its first weights differed by one.

    Args:
        plain: The run on one device.
        near: The same from first weights that differ by a rounding.
        other: The run on the backend.
        backend: Its name.
        ranks: Its number of processes.
        steps: The steps of each run.
        computed: The types in which the training computes, beside those of weights and optimizer states.
    """
    name = f"backend {backend}"
    if other.is_refused:
        return VerifyReport(name, ranks, "its own", None, {}, [], [f"it refused: {other.failed}"])
    if other.failed:
        failure = Finding("the run", "", 0, other.failed)
        return VerifyReport(name, ranks, "its own", failure, {}, [], [])
    first, nudged = plain.records[0], near.records[0]
    dtypes = {tensor.dtype for kind in ("weights", "states") for tensor in first[kind].values()}
    bound = Bound.of([*computed, *dtypes], depth="training")
    if (first["backend"], other.records[0]["backend"]) != ("single", backend):
        own = f"the script itself names a backend, {other.records[0]['backend']!r}"
        return VerifyReport(name, ranks, "its own", None, {}, [], [own])
    compared: dict[str, int] = {}
    finding = _first_batch_apart(first["rows"], [record["rows"] for record in other.records], compared)
    for rank, record in enumerate(other.records):
        if finding is not None:
            break
        apart = _first_apart(first, record, compared, nudged, bound)
        if apart is not None:
            if apart.what in ("the weight", "the state"):
                # A weight may have parted long before the end.
                norms = _norms_of_whole_weights(first, record)
                apart = _first_step_apart(norms, record["norms"], nudged["norms"], bound) or apart
            finding = replace(apart, said=f"rank {rank}: {apart.said}")
    finding = finding or _first_saved_apart(plain, other, steps, compared, near, bound)
    proven = []
    if finding is None:
        proven = [f"{steps} steps: weights, optimizer state, metrics and the checkpoint, up to rounding"]
    not_covered = _hidden_by_rounding(_growth(plain, near), bound)
    if first["is_drawn"]:
        left_out = "dropout and the statistics of batch norms, which were left out of this comparison"
        not_covered = [left_out, *not_covered]
    return VerifyReport(
        name,
        ranks,
        "its own",
        finding,
        compared,
        proven,
        not_covered,
        seconds=other.seconds,
    )


def _norms_of_whole_weights(first: dict[str, Any], record: dict[str, Any]) -> dict[int, dict[str, float]]:
    """Return the norms after each step of the weights of which a rank has the whole."""
    shapes = {name: tensor.shape for name, tensor in record["weights"].items()}
    whole = {name for name, tensor in first["weights"].items() if shapes.get(name) == tensor.shape}
    norms = {}
    for step, by_name in first["norms"].items():
        norms[step] = {name: norm for name, norm in by_name.items() if name in whole}
    return norms


def _growth(plain: ScriptRun, near: ScriptRun) -> float:
    """Return how far a rounding has grown, as the largest share of a weight."""
    weights, nudged = plain.records[0]["weights"], near.records[0]["weights"]
    return max((relative_error(tensor, nudged[name]) for name, tensor in weights.items()), default=0.0)


def _hidden_by_rounding(growth: float, bound: Bound) -> list[str]:
    """Return what a comparison cannot see where a rounding grows beyond the least bound."""
    hidden = SLACK * growth
    if hidden <= bound.rtol:
        return []
    return [f"less than {hidden:.1g} of a weight: one rounding at the start grows to {growth:.1g}"]


def _first_batch_apart(
    whole: Sequence[list[float]], ranks: Sequence[Sequence[list[float]]], compared: dict[str, int]
) -> Finding | None:
    """Return the first batch of which ranks have other rows; each has all of them, or they share them.

    A rank may call its model for parts of a share, or not at all: then nothing is compared.
    """
    if any(len(parts) != len(whole) for parts in ranks):
        return None
    for number, (rows, *parts) in enumerate(zip(whole, *ranks, strict=False), 1):
        joined = [row for part in parts for row in part]
        if all(len(part) == len(rows) for part in parts):
            is_same = all(part == rows for part in parts)
        elif len(joined) == len(rows):
            is_same = sorted(joined) == sorted(rows)
        else:
            continue
        compared["batches"] = compared.get("batches", 0) + 1
        if not is_same:
            return Finding("the order of samples", "", number, "the batch has other rows")
    return None


def _first_step_apart(
    whole: Mapping[int, Mapping[str, float]],
    other: Mapping[int, Mapping[str, float]],
    near: Mapping[int, Mapping[str, float]] | None = None,
    bound: Bound | None = None,
) -> Finding | None:
    """Return the first step after which the norm of a weight is another one; ``near`` has one by rounding."""
    for step, norms in whole.items():
        for name, norm in norms.items():
            got = other.get(step, {}).get(name, norm)
            if near is None:
                nudged = None
            else:
                nudged = near.get(step, {}).get(name)
            if abs(got - norm) > _limit(norm, nudged, bound, norm):
                module, _, parameter = name.rpartition(".")
                difference = f"its norm is {got:.9g}, and not {norm:.9g}"
                return Finding("the weight", module, step, difference, parameter)
    return None


def _limit(value: float, near: float | None, bound: Bound | None, scale: float) -> float:
    """Return how far a number may be from ``value``, by the one of a run that differed by a rounding.

    Without a bound it has to be equal.
    """
    if bound is None:
        return 0.0
    whole = torch.tensor(value, dtype=torch.float64)
    if near is None:
        nudged = None
    else:
        nudged = torch.tensor(near, dtype=torch.float64)
    return bound.limit(whole, nudged, scale)


def _first_apart(
    first: dict[str, Any],
    second: dict[str, Any],
    compared: dict[str, int],
    near: dict[str, Any] | None = None,
    bound: Bound | None = None,
) -> Finding | None:
    """Return the first of the recorded numbers that differs, at all or by more than rounding explains."""
    steps = first["step"]
    if second["step"] != steps:
        return Finding("the number of steps", "", 0, f"{second['step']}, and {steps} on one device")
    for what, kind in (("the weight", "weights"), ("the buffer", "buffers"), ("the state", "states")):
        scale = max((norm_of(t) for t in first[kind].values()), default=0.0)
        for name, tensor in first[kind].items():
            other = second[kind].get(name)
            if other is None or other.shape != tensor.shape:
                continue  # a rank has a part of it, or nothing; the checkpoint has all
            compared[kind] = compared.get(kind, 0) + 1
            nudged = None if near is None else near[kind].get(name)
            difference = _difference(tensor, other, scale, nudged, bound)
            if difference:
                path, _, key = name.partition(":")
                module, _, parameter = path.rpartition(".")
                return Finding(what, module, steps, difference, f"{parameter} {key}".strip())
    for epoch, values in second["metrics"].items():  # of a resumed run, those since it was stopped
        for name, value in first["metrics"].get(epoch, {}).items():
            compared["metrics"] = compared.get("metrics", 0) + 1
            got = values.get(name)
            if near is None:
                nudged = None
            else:
                nudged = near["metrics"].get(epoch, {}).get(name)
            # A count or a share of 0 is right by the scale of 1.
            limit = _limit(value, nudged, bound, max(1.0, abs(value)))
            if got is None or abs(got - value) > limit:
                return Finding("the metric", name, steps, f"of epoch {epoch} is {got}, and not {value}")
    return None


def _first_saved_apart(
    first: ScriptRun,
    second: ScriptRun,
    steps: int,
    compared: dict[str, int],
    near: ScriptRun | None = None,
    bound: Bound | None = None,
) -> Finding | None:
    """Return the first tensor of the last checkpoint that differs."""
    for prefix, what in (("model.", "the saved weight"), ("optimizer.", "the saved state")):
        tensors = {n: t for n, t in first.saved.items() if n.startswith(prefix)}
        scale = max((norm_of(t) for t in tensors.values()), default=0.0)
        for name, tensor in tensors.items():
            other = second.saved.get(name)
            compared["saved"] = compared.get("saved", 0) + 1
            nudged = None if near is None else near.saved.get(name)
            difference = "it is missing"
            if other is not None:
                difference = _difference(tensor, other, scale, nudged, bound)
            if difference:
                module, _, key = name.removeprefix(prefix).rpartition(".")
                return Finding(what, module, steps, difference, key)
    return None


def _difference(tensor: Tensor, other: Tensor, scale: float, near: Tensor | None, bound: Bound | None) -> str:
    if bound is not None:
        return difference_in_words(tensor, other, bound.limit(tensor, near, scale))
    if other.shape != tensor.shape:
        return difference_in_words(tensor, other, 0.0)
    if torch.equal(tensor, other):
        return ""
    return "it differs"
