"""``tp test``: a comparison of every installed backend with one device, on a small model.

Its ranks are processes ``python -m tp_trainer._self_test BACKEND DEVICES FOLDER``.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset
from tp_core import LaunchEnvironment, resolve_devices
from tp_core.discovery import Contribution
from tp_core.errors import SelectionError, TpError
from tp_core.internal import check_backend_name, check_process_count, output_console
from tp_core.plugins import Backend, Job, Verdict, registry
from tp_core.state import load_state

from tp_trainer import Trainer

# -- The small job, and the same by hand on one device --------------------------------------------


_SAMPLES, _BATCH, _EPOCHS, _RATE, _CLIP = 22, 4, 2, 0.1, 0.5  # the last batch is smaller than the others
_WEIGHTS, _LOSSES = "model.pt", "losses.json"


@dataclass(frozen=True, slots=True)
class Numbers:
    """The numbers of a training: the whole model, and epochs' means, of training and validation."""

    weights: dict[str, Tensor]
    losses: list[float]

    def difference(self, other: "Numbers") -> float:
        """Return the largest difference between two runs' numbers; infinite where names or counts differ."""
        same_shapes = {n: t.shape for n, t in self.weights.items()} == {
            n: t.shape for n, t in other.weights.items()
        }
        if not same_shapes or len(self.losses) != len(other.losses):
            return float("inf")
        pairs = [(torch.tensor(self.losses), torch.tensor(other.losses))]
        pairs += [(tensor, other.weights[name]) for name, tensor in self.weights.items()]
        found = [(a.double() - b.double()).abs().max().item() for a, b in pairs]
        return max(found) if all(value == value for value in found) else float("inf")  # noqa: PLR0124 - NaN


def type_of(devices: list[torch.device]) -> torch.dtype:
    """Return the type of the computation: float64, if every device has it."""
    return torch.float32 if any(device.type == "mps" for device in devices) else torch.float64


def _model(dtype: torch.dtype) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 8), nn.Tanh(), nn.Linear(8, 3))
    return model.to(dtype)


def _data(count: int, dtype: torch.dtype) -> TensorDataset:
    generator = torch.Generator().manual_seed(count)
    x, y = (torch.randn(count, n, dtype=torch.float64, generator=generator).to(dtype) for n in (6, 3))
    return TensorDataset(x, y)


def _step(model: nn.Module, batch: Any) -> Tensor:
    return nn.functional.mse_loss(model(batch[0]), batch[1])


def _optimizer(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=_RATE, momentum=0.9)


def reference(dtype: torch.dtype) -> Numbers:
    """Train by hand on the CPU, without tp."""
    model, data, few = _model(dtype), _data(_SAMPLES, dtype).tensors, _data(5, dtype)
    optimizer, losses = _optimizer(model), []
    for _ in range(_EPOCHS):
        total = 0.0
        for first in range(0, _SAMPLES, _BATCH):
            batch = [tensor[first : first + _BATCH] for tensor in data]
            optimizer.zero_grad()
            loss = _step(model, batch)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), _CLIP)
            optimizer.step()
            total += loss.item() * len(batch[0])
        with torch.no_grad():
            losses += [total / _SAMPLES, _step(model, few.tensors).item()]
    return Numbers(dict(model.state_dict()), losses)


def train(backend: Backend[Any], devices: list[torch.device], folder: Path) -> None:
    """Train on a backend, and write the numbers into ``folder``; call it on every rank."""
    dtype = type_of(devices)
    few = DataLoader(_data(5, dtype), batch_size=_BATCH)
    options = {backend.name: backend.self_test_options}
    with Trainer(backend=backend.name, devices=devices, seed=0, progress=False, options=options) as trainer:
        model = backend.adapt_model(_model(dtype), _data(_SAMPLES, dtype).tensors[0])
        history = trainer.fit(
            model,
            _optimizer(model),
            DataLoader(_data(_SAMPLES, dtype), batch_size=_BATCH),
            step=_step,
            epochs=_EPOCHS,
            validation=few,
            clip_norm=_CLIP,
        )
        losses = [means["loss"] for record in history for means in (record.train, record.val)]
        trainer.save_model(model, folder / _WEIGHTS)
        if trainer.is_main:
            (folder / _LOSSES).write_text(json.dumps(losses))


def read_numbers(folder: Path) -> Numbers:
    return Numbers(dict(load_state(folder / _WEIGHTS)), json.loads((folder / _LOSSES).read_text()))


# -- A process of ``tp test`` ---------------------------------------------------------------------


def main(name: str, devices: str, folder: Path) -> None:
    """Train on a backend; write the reason of a failure into ``folder``."""
    try:
        backend = next(c.item for c in registry.backends() if c.item.name == name)
        train(backend, [torch.device(device) for device in devices.split(",")], folder)
    except BaseException as error:
        said = {"unfit": isinstance(error, SelectionError), "reason": f"{type(error).__name__}: {error}"}
        (folder / f"error-{os.environ.get('RANK', '0')}.json").write_text(json.dumps(said))
        raise


# -- The setups of this host ----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Setup:
    """A backend, and the processes and devices of its test.

    Attributes:
        origin: Its distribution and version.
        devices: The devices of one process, or one for each rank.
        unfit: The reason for which the backend cannot be tested here; empty if it can.
    """

    backend: str
    origin: str
    processes: int = 1
    devices: tuple[torch.device, ...] = ()
    unfit: str = ""


def find_setups(backends: Iterable[Contribution[Backend[Any]]], *, ranks: int) -> list[Setup]:
    """Return the setups of this host that each backend fits; if it fits none, one with the reason."""
    ways = list(_device_layouts(ranks))
    found: list[Setup] = []
    for contribution in backends:
        backend = contribution.item
        origin = f"{contribution.distribution} {contribution.version}".rstrip()
        verdicts = [(way, _assess(backend, *way)) for way in ways]
        fitting = [Setup(backend.name, origin, *way) for way, verdict in verdicts if verdict.is_fit]
        reasons = list(dict.fromkeys(verdict.reason for _, verdict in verdicts))
        found += fitting or [Setup(backend.name, origin, unfit="; or ".join(reasons))]
    return found


def _device_layouts(ranks: int) -> Iterable[tuple[int, tuple[torch.device, ...]]]:
    """Yield processes and devices: the CPU and the accelerators, alone, in one process, one for each rank."""
    cpu, here = torch.device("cpu"), tuple(resolve_devices("auto"))
    accelerators = tuple(device for device in here if device.type != "cpu")
    yield 1, (cpu,)
    yield 1, (cpu, cpu)
    yield ranks, (cpu,) * ranks
    if accelerators:
        yield 1, accelerators[:1]
    if len(accelerators) > 1:
        yield 1, accelerators
        yield len(accelerators), accelerators


def _assess(backend: Backend[Any], processes: int, devices: tuple[torch.device, ...]) -> Verdict:
    environment = LaunchEnvironment(world_size=processes, local_world_size=processes)
    job = Job(
        devices=devices if processes == 1 else devices[:1], environment=environment, explicit_devices=True
    )
    try:
        return backend.assess(job)
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        return Verdict.unfit(f"its assessment raised {type(error).__name__}: {error}")


# -- The test of a setup, in processes that end at a deadline -------------------------------------


TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""The largest difference that rounding explains, by the type of the computation."""

_GRACE_S = 10.0  # for the launcher to end its ranks, twice
_LAUNCHED = ("GROUP_", "LOCAL_", "MASTER_", "RANK", "ROLE_", "SLURM_", "TORCHELASTIC_", "WORLD_SIZE")

Outcome = Literal["equal", "differs", "failed", "hangs", "unfit"]


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a setup.

    Attributes:
        outcome: Whether its numbers equal one device's; "unfit" if it could not be tested.
        difference: The largest difference from one device, of weights and losses, if it was trained.
        seconds: The seconds of the test, with the start and end of its processes.
    """

    setup: Setup
    outcome: Outcome
    reason: str = ""
    difference: float | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether the setup passed, or could not be tested."""
        return self.outcome in ("equal", "unfit")

    def to_dict(self) -> dict[str, Any]:
        return {
            "backend": self.setup.backend,
            "origin": self.setup.origin,
            "processes": self.setup.processes,
            "devices": [str(device) for device in self.setup.devices],
            "outcome": self.outcome,
            "reason": self.reason,
            "difference": self.difference if self.difference != float("inf") else None,
            "seconds": round(self.seconds, 3),
        }


def run_setup(setup: Setup, *, timeout_s: float) -> Result:
    """Train in a setup and compare with one device; return a result for every failure and hang, too."""
    if setup.unfit:
        return Result(setup, "unfit", setup.unfit)
    with tempfile.TemporaryDirectory(prefix="tp-test-") as name:
        folder, began = Path(name), time.perf_counter()
        status = _run(setup, folder, timeout_s)
        seconds = time.perf_counter() - began
        if status is None:
            return Result(setup, "hangs", f"it had not ended after {timeout_s:g} s", seconds=seconds)
        if status:
            outcome, reason = _reason_of_failure(folder, status)
            return Result(setup, outcome, reason, seconds=seconds)
        try:
            found = read_numbers(folder)
        except (OSError, TpError, ValueError) as error:
            return Result(setup, "failed", f"it left no weights: {error}", seconds=seconds)
        dtype = type_of(list(setup.devices))
        difference = found.difference(reference(dtype))
        if difference <= TOLERANCE[dtype]:
            return Result(setup, "equal", "", difference, seconds)
        reason = f"it trains other weights or losses than one device, by up to {difference:.2g}"
        return Result(setup, "differs", reason, difference, seconds)


def _run(setup: Setup, folder: Path, timeout_s: float) -> int | None:
    """Run the processes of a setup; return the exit status, ``None`` if they had to be ended."""
    rank = ["-m", "tp_trainer._self_test", setup.backend, ",".join(map(str, setup.devices)), str(folder)]
    launcher = ["-m", "tp_core.cli", "launch", "-n", str(setup.processes), "--grace-s", "5"]
    command = [sys.executable, *(rank if setup.processes == 1 else [*launcher, *rank])]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(_LAUNCHED) and k != "TP_BACKEND"}
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,  # so that _end() can kill its children with it
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all its children, the launcher's ranks included."""
    # SIGTERM first: the launcher must end its ranks, which are in process groups of their own.
    for _ in range(2):
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _reason_of_failure(folder: Path, status: int) -> tuple[Outcome, str]:
    """Return the reason of the rank that failed first, or the last line of the output."""
    said = sorted(folder.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    if said:
        values = json.loads(said[0].read_text())
        return ("unfit" if values["unfit"] else "failed"), values["reason"]
    ended = f"status {status}" if status > 0 else signal.Signals(-status).name
    lines = (folder / "output").read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    return "failed", f"it ended with {ended}: {last}"


# -- ``tp test`` ----------------------------------------------------------------------------------


_STYLES = {"equal": "green", "unfit": "dim"}


def test_app() -> typer.Typer:
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(_test)
    return app


def _test(
    *,
    backend: Annotated[list[str] | None, typer.Option(help="This one alone; repeatable.")] = None,
    ranks: Annotated[int, typer.Option(min=2, help="How many processes where there are several.")] = 2,
    timeout_s: Annotated[
        float,
        typer.Option(min=1, max=86_400, help="Seconds that each training may take."),
    ] = 300.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Train a small model on every installed backend, and compare the numbers with one device.

    Each backend that fits this host is tried on the CPU and on the accelerators: with one device, with
    several in one process, with one process for each. One that fails or hangs is named, and the others go
    on. The exit status is 0 only if every one of them trains what one device trains.
    """
    check_process_count("--ranks", ranks)
    backends = registry.backends()
    for name in backend or ():
        check_backend_name(name, {c.item.name for c in backends})
    setups = find_setups([c for c in backends if not backend or c.item.name in backend], ranks=ranks)
    results = _run_all(setups, timeout_s)
    ok = all(result.ok for result in results) and any(result.outcome == "equal" for result in results)
    if as_json:
        typer.echo(json.dumps({"ok": ok, "tests": [result.to_dict() for result in results]}, indent=2))
    else:
        _print(results)
    raise typer.Exit(0 if ok else 1)


def _run_all(setups: Sequence[Setup], timeout_s: float) -> list[Result]:
    console, results = Console(stderr=True), []
    with console.status("") as status:  # shows nothing if stderr is not a terminal
        for number, setup in enumerate(setups, start=1):
            status.update(f"{number} of {len(setups)}: {escape(setup.backend)}, {_where(setup)}")
            results.append(run_setup(setup, timeout_s=timeout_s))
    return results


def _where(setup: Setup) -> str:
    devices = [str(device) for device in setup.devices]
    if setup.processes > 1:
        return f"{setup.processes} processes ({', '.join(dict.fromkeys(devices))})"
    return f"one process ({', '.join(devices)})" if devices else "-"


def _print(results: Sequence[Result]) -> None:
    console = output_console()
    table = Table("backend", "from", "where", "outcome", "difference", "seconds", box=None, pad_edge=False)
    for result in results:
        style = _STYLES.get(result.outcome, "red")
        difference = "" if result.difference is None else f"{result.difference:.1e}"
        table.add_row(
            escape(result.setup.backend),
            escape(result.setup.origin),
            _where(result.setup),
            f"[{style}]{result.outcome}[/]",
            difference,
            f"{result.seconds:.1f}" if result.seconds else "",
        )
    console.print(table)
    for result in results:
        if result.reason:
            head = f"{result.setup.backend}, {_where(result.setup)}: {result.outcome}: "
            console.print(escape(head + result.reason))
    wrong = sum(not result.ok for result in results)
    tried = sum(result.outcome == "equal" for result in results)
    if wrong:
        console.print(f"\n[red]{wrong} of {len(results)} do not train what one device trains.[/]")
    elif tried:
        console.print(f"\n{tried} trained what one device trains.")
    else:
        console.print("\n[red]No backend could be tried.[/]")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
