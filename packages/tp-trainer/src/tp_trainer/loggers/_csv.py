"""Numbers in a CSV file: one row for each logged step."""

import csv
import io
import os
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import IO, Any, ClassVar

from tp_core.errors import StateError
from tp_core.files import atomic_part, showing_system_errors
from tp_core.plugins import Logger, RunInfo, RunStatus

from tp_trainer._peer_names import explain_fields
from tp_trainer.loggers._files import LogPlace, sync

_FIRST = ("step", "epoch")


@explain_fields
class CsvLogger(Logger):
    """Writes ``metrics.csv``: the columns "step", "epoch" and one for each name.

    Each flush passes the rows to the operating system, so that a killed process loses none of them. A resumed
    run drops the rows after its checkpoint and appends. A new run renames an older file to ``metrics-1.csv``;
    if another run still writes to the file, the new run takes such a name itself. A new name becomes a
    further column; a name without a number in a row has an empty field.

    Args:
        folder: The folder of the file; by default the folder of the run's checkpoints.
        filename: Its name.

    Raises:
        ConfigError: In :meth:`open`: there is no folder.
        StateError: In :meth:`open`: the file to continue is not a file of this logger.
    """

    name: ClassVar[str] = "csv"

    def __init__(
        self, folder: str | os.PathLike[str] | None = None, *, filename: str = "metrics.csv"
    ) -> None:
        self._place = LogPlace("CsvLogger", folder, filename)
        self._columns: list[str] = []
        self._has_rows = False  # whether the file does
        self._file: IO[str] | None = None
        self._waiting: list[tuple[int, int, Mapping[str, float]]] = []  # rows since the last flush

    def open(self, info: RunInfo) -> None:
        """Start the file, or continue it.

        Raises:
            ConfigError: Neither the logger nor the run has a folder.
            StateError: The file to continue is not a file of this logger.
        """
        rows: list[dict[str, str]] = []
        self._columns = list(_FIRST)
        with self._place.opening(info) as goes_on:
            if goes_on and self._place.path.exists():
                self._columns, rows = _read(self._place.path)
                rows = [row for row in rows if int(row["step"]) <= info.step]
            self._rewrite(rows)

    def log(self, numbers: Mapping[str, float], *, step: int, epoch: int) -> None:
        if numbers:
            self._waiting.append((step, epoch, numbers))

    def flush(self) -> None:
        waiting, self._waiting = self._waiting, []
        if self._file is None or not waiting:
            return
        columns = set(self._columns)
        new = dict.fromkeys(name for *_, numbers in waiting for name in numbers if name not in columns)
        if new:
            self._columns += new
            if self._has_rows:
                self._rewrite(_read(self._place.path)[1])
            else:
                self._rewrite([])
        names = self._columns[2:]
        rows: list[list[Any]] = []
        for step, epoch, numbers in waiting:
            row: list[Any] = [step, epoch]
            for name in names:
                if name in numbers:
                    cell = repr(float(numbers[name]))
                else:
                    cell = ""
                row.append(cell)
            rows.append(row)
        with showing_system_errors(self._place.path):
            csv.writer(self._file).writerows(rows)
            self._file.flush()
        self._has_rows = True

    def close(self, status: RunStatus) -> None:  # noqa: ARG002 - a table has no place for it
        try:
            self.flush()
            if self._file is not None:
                self._file.close()
        finally:
            self._file = None
            self._place.close()

    def state_dict(self) -> dict[str, Any]:
        """Sync the rows to the disk; a resumed run finds them by their steps."""
        self.flush()
        if self._file is not None:
            sync(self._file)
        return self._place.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._place.load_state_dict(state)

    def _rewrite(self, rows: list[dict[str, str]]) -> None:
        """Write the file with the current columns, atomically if it has rows, and open it to append."""
        if self._file is not None:
            self._file.close()
        self._has_rows = bool(rows)
        path = self._place.path
        # A head alone is nothing to lose, and syncing it to the disk would take as long as many steps.
        place = atomic_part(path) if rows else nullcontext(path)
        with place as part, part.open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(self._columns)
            writer.writerows([row.get(name, "") for name in self._columns] for row in rows)
        self._file = path.open("a", encoding="utf-8", newline="")


def _read(path: Path) -> tuple[list[str], list[dict[str, str]]]:
    """Return the columns and the rows, without an incomplete last row."""
    text = path.read_bytes().decode("utf-8", errors="replace")
    whole = text[: text.rfind("\n") + 1]
    columns, *rows = list(csv.reader(io.StringIO(whole, newline=""))) or [list(_FIRST)]
    if tuple(columns[:2]) != _FIRST:
        msg = f"{path} is not a file of CsvLogger: its columns are {', '.join(columns)}; give another folder"
        raise StateError(msg)
    return columns, [
        dict(zip(columns, row, strict=True)) for row in rows if len(row) == len(columns) and row[0].isdigit()
    ]
