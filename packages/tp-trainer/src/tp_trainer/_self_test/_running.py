"""One setup after the other, each in processes of its own that end at a deadline."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tp_core.errors import TpError

from tp_trainer._self_test._setups import Setup
from tp_trainer._self_test._training import read_numbers, reference, type_of

__all__ = ["TOLERANCE", "Result", "run_setup"]

TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}
"""The largest difference that is rounding alone, by the type that is computed in."""

_RANK = "tp_trainer._self_test._rank"
_GRACE_S = 10.0  # for the launcher to end its ranks, twice
_LAUNCHED = ("GROUP_", "LOCAL_", "MASTER_", "RANK", "ROLE_", "SLURM_", "TORCHELASTIC_", "WORLD_SIZE")

Outcome = Literal["equal", "differs", "failed", "hangs", "unfit"]


@dataclass(frozen=True, slots=True)
class Result:
    """How a setup ended.

    Attributes:
        setup: What was tried.
        outcome: Whether its numbers are those of one device; "unfit" where it could not be tried.
        reason: Why not, for all but "equal".
        difference: The largest difference from one device, of weights and losses, if it was trained.
        seconds: How long it took, processes started and ended.
    """

    setup: Setup
    outcome: Outcome
    reason: str = ""
    difference: float | None = None
    seconds: float = 0.0

    @property
    def ok(self) -> bool:
        """Whether nothing is wrong with it."""
        return self.outcome in ("equal", "unfit")

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON can say it."""
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
    """Train in a setup and compare with one device; whatever happens there, this returns.

    Args:
        setup: What to try.
        timeout_s: After how many seconds its processes are ended.
    """
    if setup.unfit:
        return Result(setup, "unfit", setup.unfit)
    with tempfile.TemporaryDirectory(prefix="tp-test-") as name:
        folder, began = Path(name), time.perf_counter()
        status = _run(setup, folder, timeout_s)
        seconds = time.perf_counter() - began
        if status is None:
            return Result(setup, "hangs", f"it had not ended after {timeout_s:g} s", seconds=seconds)
        if status:
            outcome, reason = _failure(folder, status)
            return Result(setup, outcome, reason, seconds=seconds)
        try:
            found = read_numbers(folder)
        except (OSError, TpError) as error:
            return Result(setup, "failed", f"it left no weights: {error}", seconds=seconds)
        dtype = type_of(list(setup.devices))
        difference = found.difference(reference(dtype))
        if difference <= TOLERANCE[dtype]:
            return Result(setup, "equal", "", difference, seconds)
        reason = f"it trains other weights or losses than one device, by up to {difference:.2g}"
        return Result(setup, "differs", reason, difference, seconds)


def _run(setup: Setup, folder: Path, timeout_s: float) -> int | None:
    """Run the processes of a setup; return the exit status, ``None`` if they had to be ended."""
    rank = ["-m", _RANK, setup.backend, ",".join(map(str, setup.devices)), str(folder)]
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
            start_new_session=True,  # what it starts ends with it
        )
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    """End a process and all that it has started, the launcher's ranks included."""
    for _ in range(2):  # a launcher that is asked twice kills its ranks
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _failure(folder: Path, status: int) -> tuple[Outcome, str]:
    """Return what the rank that failed first has said, or the last line of what was printed."""
    said = sorted(folder.glob("error-*.json"), key=lambda path: path.stat().st_mtime_ns)
    if said:
        values = json.loads(said[0].read_text())
        return ("unfit" if values["unfit"] else "failed"), values["reason"]
    ended = f"status {status}" if status > 0 else signal.Signals(-status).name
    lines = (folder / "output").read_text(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), "it printed nothing")
    return "failed", f"it ended with {ended}: {last}"
