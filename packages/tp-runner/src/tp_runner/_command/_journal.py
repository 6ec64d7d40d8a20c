"""An output file that knows what it has, so that work can go on after any kind of interruption."""

import json
import os
from pathlib import Path
from typing import Any, Self

from tp_core.errors import StateError

from tp_runner._command._readers import Record

__all__ = ["Journal"]


class Journal:
    """One JSON object on each line: source, line, and result or error.

    The results are the record of what is done, so the two can never contradict each other. A line
    that an interruption cut off, and those of items that failed, are removed when the file is opened
    again: such items are still to be done. With ``-`` results go to standard output, and nothing is
    done before.

    Attributes:
        n_before: How many items were done before.
        n_again: How many had failed before, and are tried again.
        n_now: How many lines were written.
    """

    def __init__(self, path: Path) -> None:
        self.n_before = 0
        self.n_again = 0
        self.n_now = 0
        self._path = path
        self._done: set[tuple[str, int]] = set()

    def __enter__(self) -> Self:
        if str(self._path) == "-":
            self._fd = os.dup(1)
            return self
        self._path.parent.mkdir(parents=True, exist_ok=True)
        if self._path.exists():
            self._read_back()
        self.n_before = len(self._done)
        self._fd = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def _read_back(self) -> None:
        end, failed = 0, set[int]()
        with self._path.open("rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n"):
                    break
                if not self._note(line, number):
                    failed.add(number)
                end += len(line)
        os.truncate(self._path, end)
        self.n_again = len(failed)
        if failed:
            kept = self._path.with_name(f".{self._path.name}.kept")
            with self._path.open("rb") as file, kept.open("wb") as new:
                new.writelines(line for number, line in enumerate(file, 1) if number not in failed)
                new.flush()
                os.fsync(new.fileno())
            kept.replace(self._path)

    def has(self, record: Record) -> bool:
        """Whether the result of a record is in the file."""
        return _key(record.source, record.line) in self._done

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
        os.write(self._fd, line.encode() + b"\n")
        self.n_now += 1
        return failed

    def _note(self, line: bytes, number: int) -> bool:
        """Take note of a line; return whether its item is done."""
        try:
            entry = json.loads(line)
            key = _key(entry["source"], entry["line"])
            is_done = "error" not in entry
        except (ValueError, KeyError, TypeError) as error:
            msg = f"line {number} of {self._path} was not written by this command; take another file"
            raise StateError(msg) from error
        if is_done:
            self._done.add(key)
        return is_done


def _key(source: str, line: int) -> tuple[str, int]:
    """Return what an item is known by, however its file is spelled."""
    return os.path.realpath(source), line


def _plain(value: Any) -> Any:
    """Return tensors, arrays and their scalars as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    msg = f"{type(value).__name__} is not a JSON value"
    raise TypeError(msg)
