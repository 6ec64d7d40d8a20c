"""``tp verify SCRIPT``: a script of tp trains whole, stopped and resumed, and on each backend that fits."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tp_core.errors import ConfigError
from tp_core.plugins import registry

from tp_verify._compare import Bound, norm_of
from tp_verify._report import Finding, Report

_SETUPS = {  # devices of one process, and processes
    "tuple": ("cpu,cpu", 1),
    "dp-gather": ("cpu,cpu", 1),
    "ddp": ("cpu", 2),
    "fsdp": ("cpu", 2),
    "shard": ("cpu", 2),
}
_SAVED = 128 + 15  # the exit status of a run that a SIGTERM has ended


@dataclass(frozen=True)
class Run:
    """A run of the script, and what its ranks have recorded; ``failed`` says why one did not train."""

    records: list[dict[str, Any]]
    failed: str = ""
    seconds: float = 0.0
    stop_s: float = 0.0


def verify_script(script: Path, arguments: Sequence[str], *, steps: int, timeout_s: float) -> list[Report]:
    """Verify a script that trains with a `Trainer`; return a report of resuming, and one for each backend.

    Args:
        script: The script.
        arguments: Its arguments.
        steps: The optimizer steps of each run.
        timeout_s: The deadline of each run.

    Raises:
        ConfigError: There is no such script, it does not train, or no trainer is installed.
    """
    if not script.is_file():
        msg = f"there is no script {str(script)!r}; a function is written file.py:function"
        raise ConfigError(msg)
    installed = {contribution.item.name for contribution in registry.backends()}
    command = [str(script), *arguments]
    with tempfile.TemporaryDirectory(prefix="tp-verify-") as name:
        folder = Path(name)

        def run(label: str, backend: str, **more: Any) -> Run:
            return _run(command, folder / label, backend, steps=steps, timeout_s=timeout_s, **more)

        whole = run("whole", "single")
        if whole.failed:
            msg = f"{script} does not train on the backend 'single': {whole.failed}"
            raise ConfigError(msg)
        saved = folder / "checkpoints"
        stopped = run("stopped", "single", stop=max(1, steps * 2 // 5), checkpoint=saved)
        resumed = run("resumed", "single", checkpoint=saved)
        reports = [_resumed(whole, stopped, resumed, steps)]
        plain = run("plain", "single", plain=True)
        for backend, (devices, ranks) in _SETUPS.items():
            if backend in installed:
                other = run(backend, backend, plain=True, devices=devices, ranks=ranks)
                reports.append(_compared(plain, other, backend, ranks, steps))
    return reports


def _run(
    command: Sequence[str],
    folder: Path,
    backend: str,
    *,
    steps: int,
    timeout_s: float,
    stop: int = 0,
    checkpoint: Path | None = None,
    plain: bool = False,
    devices: str = "cpu",
    ranks: int = 1,
) -> Run:
    """Run the script in processes of its own, and return what they recorded."""
    folder.mkdir()
    settings = {"folder": str(folder), "stop": stop, "plain": plain}
    environ = {
        **os.environ,
        "TP_VERIFY": json.dumps(settings),
        "TP_BACKEND": backend,
        "TP_DEVICES": devices,
        "TP_MAX_STEPS": str(steps),
        "OMP_NUM_THREADS": "1",
        **({"TP_CHECKPOINT": str(checkpoint)} if checkpoint is not None else {}),
    }
    launcher = [] if ranks == 1 else ["-m", "tp_core.cli", "launch", "-n", str(ranks)]
    began = time.time()
    try:
        done = subprocess.run(
            [sys.executable, *launcher, *command],
            env=environ,
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        return Run([], f"it had not ended after {timeout_s:g} s")
    ended = time.time()
    paths = [folder / f"rank{rank}.pt" for rank in range(ranks)]
    if not all(path.is_file() for path in paths) or (stop and done.returncode != _SAVED):
        lines = [line.strip() for line in done.stderr.splitlines() if any(map(str.isalpha, line))]
        said = (
            lines[-1] if lines else f"it ended with status {done.returncode}, and no trainer's run was seen"
        )
        return Run([], said)
    records = [torch.load(path, weights_only=False) for path in paths]
    when = folder / "stopped"
    stop_s = ended - float(when.read_text()) if when.is_file() else 0.0
    return Run(records, "", ended - began, stop_s)


def _resumed(whole: Run, stopped: Run, resumed: Run, steps: int) -> Report:
    """Compare a run that was stopped and resumed with one that was not: bit for bit."""
    name, finding = "stopped by SIGTERM and resumed", None
    if stopped.failed or resumed.failed:
        finding = Finding("the run", "", 0, stopped.failed or resumed.failed)
        return Report(name, 1, "its own", finding, {}, [], [])
    first, second = whole.records[0], resumed.records[0]
    compared: dict[str, int] = {}
    rows = stopped.records[0]["rows"] + second["rows"]
    for number, (one, other) in enumerate(zip(first["rows"], rows, strict=False), 1):
        if one != other:
            finding = Finding("the order of samples", "", number, "the batch has other rows")
            break
    else:
        if len(first["rows"]) != len(rows):
            said = f"{len(rows)} batches were seen, and {len(first['rows'])} without a stop"
            finding = Finding("the order of samples", "", 0, said)
    compared["batches"] = len(first["rows"])
    finding = finding or _first_apart(first, second, compared, exact=True)
    if finding is None and not torch.equal(first["random"], second["random"]):
        finding = Finding("the random numbers", "", steps, "the generator is in another state")
    at = stopped.records[0]["step"]
    return Report(
        name,
        1,
        "its own",
        finding,
        compared,
        [
            f"{steps} steps, of which a SIGTERM ended the run after {at}, in {stopped.stop_s:.1f} s",
            "weights, optimizer state, buffers, metrics, order of samples and random numbers, bit for bit",
        ]
        if finding is None
        else [],
        [],
        seconds=whole.seconds + stopped.seconds + resumed.seconds,
    )


def _compared(plain: Run, other: Run, backend: str, ranks: int, steps: int) -> Report:
    """Compare a run on another backend with the one on one device, up to rounding."""
    name = f"backend {backend}"
    if other.failed:
        return Report(name, ranks, "its own", None, {}, [], [f"it did not run: {other.failed}"])
    compared: dict[str, int] = {}
    finding = None
    for rank, record in enumerate(other.records):
        finding = _first_apart(plain.records[0], record, compared, exact=False)
        if finding is not None:
            finding = Finding(
                finding.what, finding.module, finding.step, f"rank {rank}: {finding.said}", finding.tensor
            )
            break
    return Report(
        name,
        ranks,
        "its own",
        finding,
        compared,
        [f"{steps} steps: weights, optimizer state and metrics, up to rounding"] if finding is None else [],
        ["dropout and the statistics of batch norms, which were left out of this comparison"],
        seconds=other.seconds,
    )


def _first_apart(
    first: dict[str, Any], second: dict[str, Any], compared: dict[str, int], *, exact: bool
) -> Finding | None:
    """Return the first of the recorded numbers that differs."""
    steps = first["step"]
    if second["step"] != steps:
        return Finding("the number of steps", "", 0, f"{second['step']}, and {steps} on one device")
    for what, kind in (("the weight", "weights"), ("the buffer", "buffers"), ("the state", "states")):
        scale = max((norm_of(t) for t in first[kind].values()), default=0.0)
        for name, tensor in first[kind].items():
            compared[kind] = compared.get(kind, 0) + 1
            said = _difference(tensor, second[kind].get(name), scale, exact=exact)
            if said:
                path, _, key = name.partition(":")
                module, _, parameter = path.rpartition(".")
                return Finding(what, module, steps, said, f"{parameter} {key}".strip())
    for epoch, (one, other) in enumerate(zip(first["metrics"], second["metrics"], strict=False), 1):
        for name, value in one.items():
            compared["metrics"] = compared.get("metrics", 0) + 1
            if name not in other or abs(other[name] - value) > (0.0 if exact else 1e-4 * max(1, abs(value))):
                got = other.get(name)
                return Finding("the metric", name, steps, f"of epoch {epoch} is {got}, and not {value}")
    return None


def _difference(tensor: Tensor, other: Tensor | None, scale: float, *, exact: bool) -> str:
    if other is None:
        return "it is missing"
    if other.shape != tensor.shape:
        return f"it has the shape {tuple(other.shape)}, and not {tuple(tensor.shape)}"
    if exact:
        return "" if torch.equal(tensor, other) else "it differs"
    bound = Bound(1e-3, 1e-4)  # of many steps in float32, each with its own rounding
    apart = norm_of(tensor.double() - other.double())
    if apart <= bound.limit(tensor, None, scale):
        return ""
    return f"it differs by {apart / max(norm_of(tensor), 1e-300):.2g} of its norm"
