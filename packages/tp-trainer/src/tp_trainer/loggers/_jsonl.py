"""The log of a run as JSON Lines, for reports: its writer and its reader.

Each line is an object, and its "type" determines its other keys. Readers skip unknown types and keys, so that
files of later versions stay readable:

- ``run``: the start of the run or of its continuation: "format", "step", "epoch", "resumed",
  "hyperparameters", "environment", "selection", "candidates", "versions"
- ``numbers``: "step", "epoch", "numbers", by name
- ``event``: "step", "epoch", "event", "facts"
- ``end``: "status"

All have "time", in seconds since 1970. JSON has no NaN and no infinity: they are the strings "NaN",
"Infinity" and "-Infinity".
"""

import json
import math
import os
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, ClassVar

from tp_core.errors import StateError
from tp_core.files import atomic_part, showing_system_errors
from tp_core.plugins import Logger, RunInfo, RunStatus

from tp_trainer._checkpoint._folder import STATE, RunFolder, read_json
from tp_trainer._peer_names import explain_fields
from tp_trainer.loggers._files import LogPlace, sync

FILENAME = "log.jsonl"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class LoggedRun:
    """The contents of a run's ``log.jsonl``.

    Attributes:
        path: The file.
        lines: Its lines in their order, each a dict with "type" and "time".
        unreadable: The number of unreadable lines: 1 if the run was killed during a write.
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
        """The names of all numbers, in order of first appearance."""
        return list(dict.fromkeys(name for line in self.of_type("numbers") for name in line["numbers"]))

    @property
    def info(self) -> dict[str, Any]:
        """The facts of the newest start of the run; empty if the file has none."""
        starts = self.of_type("run")
        if starts:
            return starts[-1]
        return {}

    @property
    def status(self) -> str:
        """How the run ended, "finished", "interrupted" or "failed", or "running or killed" without an end."""
        last = next((line for line in reversed(self.lines) if line["type"] in {"run", "end"}), None)
        if last is not None and last["type"] == "end":
            return str(last["status"])
        return "running or killed"


def read_run(path: str | os.PathLike[str]) -> LoggedRun:
    """Read the record of a run.

    A run without a log has left the numbers of its epochs in its checkpoints.

    Args:
        path: The folder of the run, or its ``log.jsonl``.

    Raises:
        FileNotFoundError: ``path`` has no record of a run.
        StateError: The file is not such a record.
    """
    path = Path(path)
    file = path / FILENAME if path.is_dir() else path
    if not file.is_file():
        saved = RunFolder(path).committed() if path.is_dir() else []
        if saved:
            return logged_epochs(file, read_json(saved[0] / STATE)["records"])
        msg = (
            f"{path} has no {FILENAME}, the record that a run leaves with log='jsonl' in the folder of its "
            "checkpoints, or where log=JsonLinesLogger(folder) says, and no checkpoint"
        )
        raise FileNotFoundError(msg)
    run = parse(file)
    if not run.lines:
        msg = f"{file} is not the record of a run: it has no line that could be read"
        raise StateError(msg)
    return run


def logged_epochs(path: Path, records: Iterable[Mapping[str, Any]]) -> LoggedRun:
    """Return the records of a run's epochs in the form of its log, without times and environment."""
    lines = []
    for record in records:
        numbers = {**record["train"], **{f"val_{name}": value for name, value in record["val"].items()}}
        numbers["learning_rate"] = record["learning_rate"]
        facts = {"step": record["steps"], "epoch": record["epoch"], "numbers": numbers}
        lines.append({"type": "numbers", "time": 0.0, **facts})
    return LoggedRun(path, tuple(lines), 0)


def parse(path: Path) -> LoggedRun:
    """Return the readable lines, and the number of unreadable ones."""
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
    """Return a line, or ``None`` for a truncated or changed one; types of later versions are kept."""
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


_MODE = 0o600  # the file has the program's arguments
_ERRORS = (
    "backslashreplace"  # names of files may have bytes that are not text: JSON writes those as \udcff, too
)


@explain_fields
class JsonLinesLogger(Logger):
    """Writes ``log.jsonl``: numbers, events, and facts about the run, one JSON object per line.

    Each flush passes the lines to the operating system, so that a killed process loses none of them.
    :func:`tp_trainer.loggers.read_run` skips an incomplete last line. A resumed run drops the numbers after
    its checkpoint, keeps the events, and appends. A new run renames an older file to ``log-1.jsonl``; if
    another run still writes to the file, the new run takes such a name itself. Only its user can read the
    file (0600), since it has the program's arguments.

    Args:
        folder: The folder of the file; by default the folder of the run's checkpoints.
        filename: Its name.

    Raises:
        ConfigError: In :meth:`open`: there is no folder.
    """

    name: ClassVar[str] = "jsonl"

    def __init__(self, folder: str | os.PathLike[str] | None = None, *, filename: str = FILENAME) -> None:
        self._place = LogPlace("JsonLinesLogger", folder, filename)
        self._file: IO[str] | None = None

    def open(self, info: RunInfo) -> None:
        with self._place.opening(info) as goes_on:
            path = self._place.path
            if goes_on and path.exists():
                lines = [
                    line
                    for line in parse(path).lines
                    if line["type"] != "numbers" or int(line["step"]) <= info.step
                ]
                with (
                    atomic_part(path, mode=_MODE) as part,
                    part.open("w", encoding="utf-8", errors=_ERRORS) as file,
                ):
                    file.writelines(_line(line) for line in lines)
            self._file = open(path, "a", encoding="utf-8", errors=_ERRORS, opener=_private)  # noqa: SIM115
            folder = None if info.folder is None else str(info.folder)
            facts = {**asdict(info), "folder": folder}
            self._write("run", {"format": FORMAT, **facts})

    def log(self, numbers: Mapping[str, float], *, step: int, epoch: int) -> None:
        if numbers:
            self._write("numbers", {"step": step, "epoch": epoch, "numbers": dict(numbers)})

    def flush(self) -> None:
        if self._file is not None:
            with showing_system_errors(self._place.path):
                self._file.flush()

    def event(self, kind: str, facts: Mapping[str, Any], *, step: int, epoch: int) -> None:
        self._write("event", {"step": step, "epoch": epoch, "event": kind, "facts": dict(facts)})

    def close(self, status: RunStatus) -> None:
        try:
            if self._file is not None:
                self._write("end", {"status": status})
                self._file.close()
        finally:
            self._file = None
            self._place.close()

    def state_dict(self) -> dict[str, Any]:
        """Sync the lines to the disk; a resumed run finds them by their steps."""
        if self._file is not None:
            sync(self._file)
        return self._place.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._place.load_state_dict(state)

    def _write(self, kind: str, values: Mapping[str, Any]) -> None:
        if self._file is not None:
            with showing_system_errors(self._place.path):
                self._file.write(_line({"type": kind, "time": round(time.time(), 3), **values}))
                if kind != "numbers":  # many of these come at once, and end with a flush()
                    self._file.flush()


def _private(path: str, flags: int) -> int:
    # O_NOFOLLOW: in a shared folder a link could make this process append to any file of its user.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), _MODE)


def _line(values: Any) -> str:
    return json.dumps(_plain(values), ensure_ascii=False, allow_nan=False, separators=(",", ":")) + "\n"


def _plain(value: Any) -> Any:
    """Return ``value`` in types that JSON has; other objects become their text."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        if math.isfinite(value):
            return value
        if math.isnan(value):
            return "NaN"
        if value > 0:
            return "Infinity"
        return "-Infinity"
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return str(value)
