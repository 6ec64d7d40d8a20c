"""Reading items from files: JSON lines, lines of text, or whole files of a directory."""

import glob
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_core.errors import ConfigError

__all__ = ["FORMATS", "Record", "read"]

FORMATS = ("auto", "jsonl", "lines", "files")


@dataclass(frozen=True, slots=True)
class Record:
    """An item and where it came from.

    Attributes:
        source: The file.
        line: The number of the line in it, from 1; 0 for a whole file.
        item: The parsed JSON value, the line without its end, or the file's path.
    """

    source: str
    line: int
    item: Any


def read(inputs: Sequence[str], form: str, *, output: Path) -> Iterator[Record]:
    """Yield the items of files, patterns and directories, in an order that is always the same.

    The output may lie among them; it is passed over.

    Raises:
        ConfigError: An input does not exist, or a line is not JSON.
    """
    for name in inputs:
        if name == "-":
            yield from _parsed(sys.stdin, "-", as_json=form == "jsonl")
            continue
        for path in _expand(name):
            if path.resolve() == output.resolve():
                continue
            kind = form
            if kind == "auto":
                whole = Path(name).is_dir() and path.suffix not in {".jsonl", ".txt"}
                kind = "jsonl" if path.suffix == ".jsonl" else "files" if whole else "lines"
            if kind == "files":
                yield Record(str(path), 0, str(path))
            else:
                yield from _lines(path, as_json=kind == "jsonl")


def _expand(name: str) -> list[Path]:
    path = Path(name)
    if path.is_dir():
        return sorted(child for child in path.rglob("*") if child.is_file())
    if path.exists():
        return [path]
    found = sorted(Path(match) for match in glob.glob(name, recursive=True))  # noqa: PTH207 - it may be absolute
    if not found:
        msg = f"no file, directory or pattern {name!r}; nothing matches it"
        raise ConfigError(msg)
    return found


def _lines(path: Path, *, as_json: bool) -> Iterator[Record]:
    with path.open(encoding="utf-8") as file:
        yield from _parsed(file, str(path), as_json=as_json)


def _parsed(lines: Iterable[str], source: str, *, as_json: bool) -> Iterator[Record]:
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        try:
            item = json.loads(text) if as_json else text
        except ValueError as error:
            msg = f"line {number} of {source} is not JSON: {error}"
            raise ConfigError(msg) from error
        yield Record(source, number, item)
