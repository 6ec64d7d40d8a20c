"""The programs of the bench: each with its fault, its right form, and the report that it re-makes."""

import importlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).parent
RANKS = 2


@dataclass(frozen=True)
class Program:
    """A program with a fault.

    Attributes:
        name: The name of its file.
        kind: The kind of the fault.
        project: Where it was.
        report: The address of the report.
        title: The title of the report.
        right: The right value.
        place: A pattern of what names the true place of the fault.
        runs: "torch" where torch's own code has the fault, else "re-made".
        folder: Where its file is.
    """

    name: str
    kind: str
    project: str
    report: str
    title: str
    right: str
    place: str
    runs: str = "re-made"
    folder: str = "programs"

    @property
    def file(self) -> Path:
        return FOLDER / self.folder / f"{self.name}.py"

    @property
    def module(self) -> ModuleType:
        return importlib.import_module(f"tests.silentbench.{self.folder}.{self.name}")

    @property
    def wrong(self) -> str:
        return str(self.module.__doc__).splitlines()[0]

    def case(self, *, right: bool) -> Mapping[str, Any]:
        """Return the arguments of `verify`."""
        return self.module.right() if right else self.module.faulty()

    def lines(self) -> int:
        """Return the lines of code."""
        return sum(1 for line in self.file.read_text(encoding="utf-8").splitlines() if line.strip())


def programs() -> list[Program]:
    """Return all programs, in the order of their kinds."""
    reports = tomllib.loads((FOLDER / "reports.toml").read_text(encoding="utf-8"))
    return [Program(name, **report) for name, report in reports.items()]


def blind_programs() -> list[Program]:
    """Return the programs that were written, and kept as they were, before any judge had seen them."""
    reports = tomllib.loads((FOLDER / "blind.toml").read_text(encoding="utf-8"))
    return [Program(name, **report, folder="blind") for name, report in reports.items()]
