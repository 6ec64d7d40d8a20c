"""An output file that knows what it has, so that work can go on after any kind of interruption."""

import contextlib
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from tp_core.errors import StateError
from tp_core.internal import Ownership, write_atomically

from tp_runner._command._readers import Record
from tp_runner._workers._process._wire import write_all

__all__ = ["Journal", "owned", "saving"]


@contextlib.contextmanager
def saving(path: Path) -> Iterator[None]:
    """Say of an error of the system in the block that it is about an output; a closed pipe is none.

    Raises:
        StateError: The block raised an ``OSError``.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        msg = f"{path} cannot be written: {error}; called again, the command goes on with what is there"
        raise StateError(msg) from error


@contextlib.contextmanager
def owned(path: Path) -> Iterator[None]:
    """Have a file of results to this process alone: two that append would do the same items twice.

    Raises:
        ConfigError: Another process writes to it.
        StateError: Its folder or its lock cannot be made.
    """
    if str(path) == "-":
        yield
        return
    with saving(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        ownership = Ownership(path)
    with ownership:
        yield


class _Line(NamedTuple):
    """What a line of the file says, beside the result itself."""

    key: tuple[str, int]
    digest: str | None
    is_done: bool


class Journal:
    """One JSON object on each line: source, line, a digest of the item, and result or error.

    The results are the record of what is done, so the two can never contradict each other. A line
    that an interruption cut off, and those of items that failed, are removed when the file is opened
    again: such items are still to be done. An item that is another one now is done again, and its old line
    removed at the end. With ``-`` results go to standard output, and nothing is done before.

    Attributes:
        n_before: How many items were done before.
        n_again: How many had failed before, and are tried again.
        n_replaced: How many were done before, and are others now.
        n_now: How many lines were written.
        n_failed: How many of those are errors.
    """

    def __init__(self, path: Path) -> None:
        self.n_before = 0
        self.n_again = 0
        self.n_replaced = 0
        self.n_now = 0
        self.n_failed = 0
        self._path = path
        self._done: dict[tuple[str, int], str | None] = {}
        self._has_stale = False

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
        if self._has_stale:
            self._keep(lambda line: line.digest in {None, self._done.get(line.key, line.digest)})

    def _read_back(self) -> None:
        """Take note of what is done; leave only that in the file."""
        end = 0
        with self._path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    break
                line = self._parsed(text, number)
                if line.is_done:
                    self._has_stale |= line.key in self._done
                    self._done[line.key] = line.digest
                else:
                    self.n_again += 1
                end += len(text)
        os.truncate(self._fd, end)
        if self.n_again:
            self._keep(lambda line: line.is_done)
            os.close(self._fd)
            self._fd = self._open()  # another file has the name now

    def _open(self) -> int:
        """Open the file to append to it, and no link, which a stranger may have put there."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        return os.open(self._path, flags, 0o666)

    def _keep(self, is_kept: Callable[[_Line], bool]) -> None:
        """Leave only some lines in the file, in one step."""

        def write(part: Path) -> None:
            with self._path.open("rb") as file, part.open("wb") as new:
                new.writelines(text for i, text in enumerate(file, 1) if is_kept(self._parsed(text, i)))

        write_atomically(write, self._path)

    def counts(self) -> dict[str, int]:
        """Return what was counted, for ``tp run --json``."""
        return {
            "done_before": self.n_before,
            "done_now": self.n_now,
            "tried_again": self.n_again,
            "replaced": self.n_replaced,
            "failed": self.n_failed,
        }

    def has(self, record: Record) -> bool:
        """Whether the result of a record is in the file."""
        key = _key(record.source, record.line)
        if key not in self._done:
            return False
        if self._done[key] in {None, record.digest}:
            return True
        self.n_replaced += 1
        return False

    def write(self, record: Record, result: Any, *, keep_going: bool) -> None:
        """Add the result of a record, or the error in its place.

        Raises:
            StateError: The result cannot be written as JSON, and nothing is to stand in its place.
        """
        entry: dict[str, Any] = {"source": record.source, "line": record.line, "input": record.digest}
        if isinstance(result, BaseException):
            line = json.dumps({**entry, "error": _described(result)})
            self.n_failed += 1
        else:
            try:
                line = json.dumps({**entry, "result": result}, default=_plain, allow_nan=False)
            except (TypeError, ValueError) as error:
                msg = (
                    f"the result of line {record.line} of {record.source} cannot be written as JSON: "
                    f"{error}; return finite numbers, text, lists, dictionaries, tensors or arrays, or "
                    "give --keep-going to have this stand in its place"
                )
                if not keep_going:
                    raise StateError(msg) from error
                self.write(record, StateError(msg), keep_going=True)
                return
        # One write of a whole line: a line is there or it is not, even if this process is killed.
        with saving(self._path):
            write_all(self._fd, line.encode() + b"\n")
        self.n_now += 1
        key = _key(record.source, record.line)
        if key in self._done:
            self._done[key] = record.digest
            self._has_stale = True

    def _parsed(self, text: bytes, number: int) -> _Line:
        try:
            entry = json.loads(text)
            key = _key(entry["source"], entry["line"])
            return _Line(key, entry.get("input"), "error" not in entry)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            msg = f"line {number} of {self._path} was not written by this command; take another file"
            raise StateError(msg) from error


def _key(source: str, line: int) -> tuple[str, int]:
    """Return what an item is known by, however its file is spelled."""
    return os.path.realpath(source), line


def _described(error: BaseException) -> dict[str, str]:
    """Return the type and the message of what the work raised, and where."""
    cause = error.__cause__ or error
    return {
        "type": getattr(error, "type_name", "") or type(error).__name__,
        "message": str(cause).partition("\n\nTraceback in the worker")[0],
        "traceback": getattr(error, "remote_traceback", ""),
    }


def _plain(value: Any) -> Any:
    """Return tensors, arrays and their scalars as lists and numbers."""
    if hasattr(value, "tolist"):
        return value.tolist()
    msg = f"{type(value).__name__} is not a JSON value"
    raise TypeError(msg)
