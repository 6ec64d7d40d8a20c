"""Reading the record that a run has left, whichever version wrote it and however it ended."""

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_core.errors import StateError

__all__ = ["FILENAME", "FORMAT", "LoggedRun", "parse", "read_run"]

FILENAME = "log.jsonl"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The record of a run, as ``log.jsonl`` has it.

    Attributes:
        path: The file.
        lines: Its lines in their order, each a dict with "type" and "time".
        unreadable: How many lines could not be read: 1 where the run was killed while it wrote.
    """

    path: Path
    lines: tuple[dict[str, Any], ...]
    unreadable: int

    def of_type(self, kind: str) -> list[dict[str, Any]]:
        """Return the lines of one type: "run", "numbers", "event" or "end"."""
        return [line for line in self.lines if line["type"] == kind]

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Return the steps at which ``name`` was logged, and its values."""
        rows = [line for line in self.of_type("numbers") if name in line["numbers"]]
        return [int(row["step"]) for row in rows], [float(row["numbers"][name]) for row in rows]

    @property
    def names(self) -> list[str]:
        """The names of all numbers, in the order in which they were first met."""
        return list(dict.fromkeys(name for line in self.of_type("numbers") for name in line["numbers"]))

    @property
    def info(self) -> dict[str, Any]:
        """What the newest start of the run said of it; empty where the file says nothing."""
        starts = self.of_type("run")
        return starts[-1] if starts else {}

    @property
    def status(self) -> str:
        """How the run ended, "finished", "interrupted" or "failed"; "running or killed" where nobody said."""
        last = next((line for line in reversed(self.lines) if line["type"] in {"run", "end"}), None)
        return str(last["status"]) if last is not None and last["type"] == "end" else "running or killed"


def read_run(path: str | os.PathLike[str]) -> LoggedRun:
    """Read the record of a run.

    Args:
        path: The folder of the run, or its ``log.jsonl``.

    Raises:
        FileNotFoundError: ``path`` has no record of a run.
        StateError: The file is not such a record.
    """
    path = Path(path)
    file = path / FILENAME if path.is_dir() else path
    if not file.is_file():
        msg = (
            f"{path} has no {FILENAME}, the record that a run leaves in the folder of its checkpoints, or "
            "where log=JsonLinesLogger(folder) says"
        )
        raise FileNotFoundError(msg)
    run = parse(file)
    if not run.lines:
        msg = f"{file} is not the record of a run: it has no line that could be read"
        raise StateError(msg)
    return run


def parse(path: Path) -> LoggedRun:
    """Return the lines that can be read, and how many cannot."""
    lines, unreadable = [], 0
    with path.open("rb") as file:
        for raw in file:
            line = _parsed(raw)
            if line is None:
                unreadable += 1
            else:
                lines.append(line)
    return LoggedRun(path, tuple(lines), unreadable)


_NEEDED = {
    "run": {"step"},
    "numbers": {"step", "epoch", "numbers"},
    "event": {"step", "event", "facts"},
    "end": {"status"},
}


def _parsed(raw: bytes) -> dict[str, Any] | None:
    """Return a line, or ``None`` for one that was cut off or changed; a type of a later version is kept."""
    try:
        line = json.loads(raw)
    except (ValueError, RecursionError):
        return None
    if not isinstance(line, dict) or not isinstance(line.get("type"), str):
        return None
    if not isinstance(line.get("time"), int | float) or not line.keys() >= _NEEDED.get(line["type"], set()):
        return None
    return line
