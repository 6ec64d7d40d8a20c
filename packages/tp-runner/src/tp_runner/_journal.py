"""An output file that knows what it has, so that work can go on after any kind of interruption."""

import json
import os
from pathlib import Path
from typing import Any, Self

from tp_core.errors import StateError

from tp_runner._readers import Record

__all__ = ["Journal"]


class Journal:
    """One JSON object on each line: source, line, and result or error.

    The results are the record of what is done, so the two can never contradict each other. A line
    that an interruption cut off is removed when the file is opened again.
    """

    def __init__(self, path: Path) -> None:
        self.n_before = 0
        self.n_now = 0
        self._path = path
        self._done: set[tuple[str, int]] = set()

    def __enter__(self) -> Self:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        end = 0
        if self._path.exists():
            with self._path.open("rb") as file:
                for number, line in enumerate(file, 1):
                    if not line.endswith(b"\n"):
                        break
                    self._note(line, number)
                    end += len(line)
            os.truncate(self._path, end)
        self.n_before = len(self._done)
        self._file = self._path.open("ab")
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def has(self, record: Record) -> bool:
        """Whether the result of a record is in the file."""
        return (record.source, record.line) in self._done

    def write(self, record: Record, result: Any) -> bool:
        """Add the result of a record; return whether it is an error.

        Raises:
            StateError: The result cannot be written as JSON.
        """
        entry: dict[str, Any] = {"source": record.source, "line": record.line}
        failed = isinstance(result, BaseException)
        entry["error" if failed else "result"] = str(result) if failed else result
        try:
            line = json.dumps(entry, default=_plain)
        except (TypeError, ValueError) as error:
            msg = (
                f"the result of line {record.line} of {record.source} cannot be written as JSON: "
                f"{error}; return numbers, text, lists, dictionaries, tensors or arrays"
            )
            raise StateError(msg) from error
        # One write of a whole line: a line is there or it is not, even if this process is killed.
        os.write(self._file.fileno(), line.encode() + b"\n")
        self.n_now += 1
        return failed

    def _note(self, line: bytes, number: int) -> None:
        try:
            entry = json.loads(line)
            key = entry["source"], entry["line"]
        except (ValueError, KeyError, TypeError) as error:
            msg = f"line {number} of {self._path} was not written by this command; take another file"
            raise StateError(msg) from error
        self._done.add(key)


def _plain(value: Any) -> Any:
    """Return tensors, arrays and their scalars as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    msg = f"{type(value).__name__} is no JSON value"
    raise TypeError(msg)
