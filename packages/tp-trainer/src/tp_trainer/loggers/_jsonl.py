"""The record of a run in a file of JSON Lines, which reports are made of: written, and read again.

Each line is an object. Its "type" says what else it has, and readers leave out what they do not know, so
that later versions stay readable:

- ``run``: the start of the run or of its continuation: "format", "step", "epoch", "resumed",
  "hyperparameters", "environment", "selection", "candidates", "versions"
- ``numbers``: "step", "epoch", "numbers", by name
- ``event``: "step", "epoch", "event", "facts"
- ``end``: "status"

All have "time", in seconds since 1970. JSON has no numbers that are not finite: they are the strings "NaN",
"Infinity" and "-Infinity".
"""

import json
import math
import os
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from tp_core.errors import StateError
from tp_core.internal import showing_system_errors, write_atomically
from tp_core.plugins import Logger, RunInfo, RunStatus

from tp_trainer.loggers._files import LogPlace, sync

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


# -- Writing -------------------------------------------------------------------------------------


_MODE = 0o600  # it has the arguments of the program
_ERRORS = (
    "backslashreplace"  # names of files may have bytes that are not text: JSON writes those as \udcff, too
)


class JsonLinesLogger(Logger):
    """Writes ``log.jsonl``: numbers, events, and what the run is, one JSON object in each line.

    Lines are with the system once a run has handed them over: a process that is killed loses none of them,
    and a last line that was cut off is left out by :func:`tp_trainer.loggers.read_run`. A resumed run drops
    the numbers after its checkpoint, keeps what happened, and goes on; a run that begins anew keeps an older
    file as ``log-1.jsonl``, and takes such a name itself while another run writes to the file. Only its user
    can read the file (0600), since it has the program's arguments.

    Args:
        folder: Where the file is; the folder of the run's checkpoints by default.
        filename: Its name.

    Raises:
        ConfigError: In :meth:`open`: there is no folder.
    """

    name: ClassVar[str] = "jsonl"

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, filename: str = FILENAME) -> None:
        self._place = LogPlace("JsonLinesLogger", folder, filename)
        self._file: IO[str] | None = None

    def open(self, info: RunInfo) -> None:
        """Begin the file, or go on with it."""
        with self._place.opening(info) as goes_on:
            path = self._place.path
            if goes_on and path.exists():
                lines = [
                    line
                    for line in parse(path).lines
                    if line["type"] != "numbers" or int(line["step"]) <= info.step
                ]
                write_atomically(lambda part: _write_all(part, lines), path, mode=_MODE)
            self._file = open(path, "a", encoding="utf-8", errors=_ERRORS, opener=_private)  # noqa: SIM115
            facts = {**asdict(info), "folder": None if info.folder is None else str(info.folder)}
            self._write("run", {"format": FORMAT, **facts})

    def log(self, numbers: Mapping[str, float], *, step: int, epoch: int) -> None:
        """Write a line of numbers."""
        if numbers:
            self._write("numbers", {"step": step, "epoch": epoch, "numbers": dict(numbers)})

    def flush(self) -> None:
        """Hand the lines to the system."""
        if self._file is not None:
            with showing_system_errors(self._place.path):
                self._file.flush()

    def event(self, kind: str, facts: Mapping[str, Any], *, step: int, epoch: int) -> None:
        """Write a line of what happened."""
        self._write("event", {"step": step, "epoch": epoch, "event": kind, "facts": dict(facts)})

    def close(self, status: RunStatus) -> None:
        """Write the last line and close the file."""
        try:
            if self._file is not None:
                self._write("end", {"status": status})
                self._file.close()
        finally:
            self._file = None
            self._place.close()

    def state_dict(self) -> dict[str, Any]:
        """Bring the lines onto the disk; a resumed run finds them by their steps."""
        if self._file is not None:
            sync(self._file)
        return self._place.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take which file is the run's."""
        self._place.load_state_dict(state)

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._file is not None:
            with showing_system_errors(self._place.path):
                self._file.write(_line({"type": kind, "time": round(time.time(), 3), **values}))
                if kind != "numbers":  # of which many come at once
                    self._file.flush()


def _private(path: str, flags: int) -> int:
    # Whoever may write to the folder could have lines added to any file of this user through a link.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), _MODE)


def _write_all(path: Path, lines: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", errors=_ERRORS) as file:
        file.writelines(_line(line) for line in lines)


def _line(values: Any) -> str:
    return json.dumps(_plain(values), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    """Return ``value`` as what JSON has; what it does not have becomes its text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
