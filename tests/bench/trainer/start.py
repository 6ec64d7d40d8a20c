"""What tp costs before it does anything: python tests/bench/trainer/start.py

Imports and discovery are timed in fresh interpreters, with 100 distributions that are made up for
it installed beside tp.
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
from rich.console import Console
from rich.table import Table
from tp_core import recursive_to

ROUNDS = 9


@dataclass
class Five:
    a: torch.Tensor
    b: torch.Tensor
    c: torch.Tensor
    d: torch.Tensor
    e: torch.Tensor


def fresh(statements: dict[str, tuple[str, str]], folder: str = "") -> dict[str, list[float]]:
    """Return the seconds of each statement in fresh interpreters, where another ran before it."""
    program = "import time, torch; {}; t = time.perf_counter(); {}; print(time.perf_counter() - t)"
    times: dict[str, list[float]] = {name: [] for name in statements}
    for _ in range(ROUNDS):
        for name, (before, statement) in statements.items():
            command = [sys.executable, "-c", program.format(before, statement)]
            environ = {**os.environ, "PYTHONPATH": folder}
            done = subprocess.run(
                command, env=environ, capture_output=True, text=True, check=True, timeout=60
            )
            times[name].append(float(done.stdout))
    return times


def install_strangers(folder: Path, count: int) -> None:
    """Make ``count`` distributions look installed that have nothing to do with tp."""
    for i in range(count):
        metadata = folder / f"stranger_{i}-1.0.dist-info"
        metadata.mkdir()
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: stranger-{i}\nVersion: 1.0\n")
        (metadata / "entry_points.txt").write_text(f"[console_scripts]\nstranger-{i} = json:tool\n")


def transfer(value: object) -> list[float]:
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        for _ in range(20_000):
            recursive_to(value, "cpu")
        times.append((time.perf_counter() - began) / 20_000)
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
        install_strangers(Path(folder), 100)
        found = fresh(statements, folder)
    rows: dict[str, tuple[list[float], float, str, str]] = {
        f"{name}, torch being there": (times, 1e3, "ms", "20" if "registry" in name else "60")
        for name, times in found.items()
    }
    rows["recursive_to, a list of five tensors that stay"] = (transfer(leaves), 1e6, "us", "3")
    named = {str(i): leaf for i, leaf in enumerate(leaves)}
    rows["recursive_to, a dict of five tensors that stay"] = (transfer(named), 1e6, "us", "3")
    fields = Five(*leaves)
    rows["recursive_to, a dataclass of five tensors that stay"] = (transfer(fields), 1e6, "us", "3")
    table = Table("what", "median", "unit", "target: at most")
    for name, (times, scale, unit, target) in rows.items():
        table.add_row(name, f"{statistics.median(times) * scale:.2f}", unit, target)
    Console().print(table)


if __name__ == "__main__":
    main()
