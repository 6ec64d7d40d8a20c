"""The journal of ``tp run``: the results so far, one JSON object a line, and with them what is done."""

import collections
import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from tp_core.errors import StateError
from tp_core.files import Ownership, write_atomically

from tp_runner._command._records import Record


@contextlib.contextmanager
def saving(path: Path) -> Iterator[None]:
    """Say of an error of the system in the block that it is about an output; a closed pipe is none."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        msg = f"{path} cannot be written: {error}; called again, the command continues after what is there"
        raise StateError(msg) from error


@contextlib.contextmanager
def owned(path: Path) -> Iterator[None]:
    """Have a file of results to this process alone: two that append would do the same items twice."""
    if str(path) == "-":
        yield
        return
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        ownership = Ownership(path)
    with ownership:
        yield


class _Line(NamedTuple):
    """A line of the file, without the result itself."""

    key: tuple[str, int]
    digest: str | None
    is_done: bool


class Journal:
    """The journal: a JSON object on each line with source, line, digest of the item, and result or error.

    The results are also the record of done items, so the two never contradict each other. Opening the file
    again removes a line that an interruption cut off, and lines of failed items: such items are not done. An
    item that was replaced is done again, and its old line is removed at the end. With ``-`` results go to
    standard output, and no item is done before.
    """

    def __init__(self, path: Path, *, allow_nan: bool = False) -> None:
        # What `counts` reports.
        self.n_before = 0  # how many items were done before
        self.n_again = 0  # how many had failed before, and are tried again
        self.n_replaced = 0  # how many were done before, and have been replaced
        self.n_now = 0  # how many lines were written
        self.n_failed = 0  # how many of those are errors
        self.n_delivered = 0  # how many are of results, and not of lines that cannot be read
        # The file, and the digests of the items that it has results of.
        self._path = path
        self._allow_nan = allow_nan  # JSON has no such numbers, and tables have
        self._done: dict[tuple[str, int], str | None] = {}
        self._has_stale_lines = False  # of items that were replaced since

    def __enter__(self) -> Self:
        if str(self._path) == "-":
            self._fd = os.dup(1)
            return self
        with saving(self._path):
            self._fd = self._open()
            try:
                self._read_back()
            except BaseException:
                os.close(self._fd)
                raise
            self.n_before = len(self._done)
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)
        if self._has_stale_lines:
            self._keep(lambda line: line.digest in {None, self._done.get(line.key, line.digest)})

    def _read_back(self) -> None:
        """Read the done items; leave only their lines in the file."""
        end = 0
        with self._path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    break
                line = self._parse(text, number)
                if line.is_done:
                    self._has_stale_lines |= line.key in self._done
                    self._done[line.key] = line.digest
                else:
                    self.n_again += 1
                end += len(text)
        os.truncate(self._fd, end)
        if self.n_again:
            self._keep(lambda line: line.is_done)
            os.close(self._fd)
            self._fd = self._open()  # _keep has put a new file in place of the old one

    def _open(self) -> int:
        """Open the file to append to it, and no link, which a stranger may have put there."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        return os.open(self._path, flags, 0o666)

    def _keep(self, is_kept: Callable[[_Line], bool]) -> None:
        """Leave only some lines in the file, in one step."""

        def write(part: Path) -> None:
            with self._path.open("rb") as file, part.open("wb") as new:
                for number, text in enumerate(file, 1):
                    if is_kept(self._parse(text, number)):
                        new.write(text)

        write_atomically(write, self._path)

    def counts(self) -> dict[str, int]:
        return {
            "done_before": self.n_before,
            "done_now": self.n_now,
            "tried_again": self.n_again,
            "replaced": self.n_replaced,
            "failed": self.n_failed,
        }

    def has(self, record: Record) -> bool:
        key = _key(record.source, record.line)
        if key not in self._done:
            return False
        if self._done[key] in {None, record.digest}:
            return True
        self.n_replaced += 1
        return False

    def write_unreadable(self, records: collections.deque[Record]) -> None:
        """Add the errors of the records that are next and cannot be read; take them away."""
        while records and records[0].error is not None:
            record = records.popleft()
            self.write(record, record.error, keep_going=True)
            self.n_delivered -= 1

    def write(self, record: Record, result: Any, *, keep_going: bool) -> None:
        """Add the result of a record, or the error in its place."""
        entry: dict[str, Any] = {"source": record.source, "line": record.line, "input": record.digest}
        if not isinstance(result, BaseException):
            try:
                line = json.dumps({**entry, "result": result}, default=_to_plain, allow_nan=self._allow_nan)
            except (TypeError, ValueError) as error:
                msg = (
                    f"the result of line {record.line} of {record.source} cannot be written as JSON: "
                    f"{error}; return finite numbers, text, lists, dictionaries, tensors or arrays, or "
                    "give --keep-going to have this stand in its place"
                )
                if not keep_going:
                    raise StateError(msg) from error
                result = StateError(msg)
        if isinstance(result, BaseException):
            line = json.dumps({**entry, "error": _error_entry(result)})
            self.n_failed += 1
        # One write of a whole line, so that it is there or not, even if this process is killed.
        with saving(self._path):
            rest = memoryview(line.encode() + b"\n")
            while rest:  # a pipe, or a full disk, may take only a part
                rest = rest[os.write(self._fd, rest) :]
        self.n_now += 1
        self.n_delivered += 1
        key = _key(record.source, record.line)
        if key in self._done:
            self._done[key] = record.digest
            self._has_stale_lines = True

    def _parse(self, text: bytes, number: int) -> _Line:
        try:
            entry = json.loads(text)
            key = _key(entry["source"], entry["line"])
            return _Line(key, entry.get("input"), "error" not in entry)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            msg = f"line {number} of {self._path} was not written by this command; take another file"
            raise StateError(msg) from error


def _key(source: str, line: int) -> tuple[str, int]:
    """Return the key of an item, the same for any path to its file."""
    return os.path.realpath(source), line


def _error_entry(error: BaseException) -> dict[str, str]:
    cause = error.__cause__ or error
    return {
        "type": getattr(error, "type_name", "") or type(error).__name__,
        "message": str(cause).partition("\n\nTraceback in the worker")[0],
        "traceback": getattr(error, "remote_traceback", ""),
    }


def _to_plain(value: Any) -> Any:
    """Return tensors, arrays and their scalars as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    msg = f"{type(value).__name__} is not a JSON value"
    raise TypeError(msg)
