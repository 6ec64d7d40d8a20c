"""What tp costs before it does anything: python -m tests.bench.trainer.start

Imports and discovery are timed in fresh interpreters, with 100 distributions that are made up for
it installed beside tp, and from bytecode, as pip leaves it: it compiles what it installs. It is CPU time,
which other programs disturb less: beside load the same question takes two to five times as long.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from tp_core import recursive_to

from tests.bench._results import Results

ROUNDS = 9


@dataclass
class Five:
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor
    e: torch.Tensor


def fresh(statements: dict[str, tuple[str, str]], folder: str) -> dict[str, list[float]]:
    """Return the CPU seconds of each statement in fresh interpreters, where another ran before it.

    Bytecode is kept in ``folder``, and the round that writes it is not counted. Importing torch leaves a full
    collection of garbage due, some 80 ms over torch's own objects, which whoever allocates next pays for: it
    is made before the clock starts, since it would belong to any import.
    """
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    environ |= {"PYTHONPATH": folder, "PYTHONPYCACHEPREFIX": f"{folder}/bytecode"}
    timed = "gc.collect(); t = time.process_time(); {}; print(time.process_time() - t)"
    program = f"import gc, time, torch; {{}}; {timed}"
    times: dict[str, list[float]] = {name: [] for name in statements}
    for counted in [False] + [True] * ROUNDS:
        for name, (before, statement) in statements.items():
            command = [sys.executable, "-c", program.format(before, statement)]
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, check=True, timeout=60
            )
            if counted:
                times[name].append(float(done.stdout))
    return times


def install_unrelated(folder: Path, count: int) -> None:
    """Make ``count`` distributions look installed that have nothing to do with tp."""
    for i in range(count):
        metadata = folder / f"unrelated_{i}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: unrelated-{i}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[console_scripts]\nunrelated-{i} = json:tool\n")


def transfer(value: object) -> list[float]:
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        for _ in range(20_000):
            recursive_to(value, "cpu")
        times.append((time.process_time() - began) / 20_000)
    return times


def main() -> None:
    leaves = [torch.zeros(1) for _ in range(5)]
    statements = {
        "import tp_core, all of it": ("pass", "from tp_core import *"),
        "from tp_trainer import Trainer": ("pass", "from tp_trainer import Trainer"),
        "first question to the registry": (
            "from tp_trainer import Trainer; from tp_core.plugins import registry",
            "registry.backends()",
        ),
    }
    with tempfile.TemporaryDirectory() as folder:
        install_unrelated(Path(folder), 100)
        found = fresh(statements, folder)
    named = {str(i): leaf for i, leaf in enumerate(leaves)}
    with Results("trainer-start") as results:
        for name, times in found.items():  # torch being there
            results.add(
                name,
                statistics.median(times) * 1e3,
                "ms",
                note="at most 20" if "registry" in name else "at most 30",
            )
        for kind, value in {"list": leaves, "dict": named, "dataclass": Five(*leaves)}.items():
            name = f"recursive_to, a {kind} of five tensors that stay"
            results.add(name, statistics.median(transfer(value)) * 1e6, "us", note="at most 3")


if __name__ == "__main__":
    main()
