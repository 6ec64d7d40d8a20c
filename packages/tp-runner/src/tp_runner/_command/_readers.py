"""Reading items from files: JSON lines, lines of text, tables, or whole files of a directory."""

import csv
import glob
import gzip
import hashlib
import importlib
import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_core.errors import ConfigError

__all__ = ["FORMATS", "Record", "import_extra", "read"]

FORMATS = ("auto", "jsonl", "lines", "csv", "parquet", "files", "images")
IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".txt": "lines"}


@dataclass(frozen=True, slots=True)
class Record:
    """An item and where it came from.

    Attributes:
        source: The file.
        line: The number of the line or row in it, from 1; 0 for a whole file.
        digest: What tells it from another item that may take its place.
        item: The parsed JSON value, the line without its end, the row as a dictionary, or the file's path.
    """

    source: str
    line: int
    digest: str
    item: Any


def read(inputs: Sequence[str], form: str, *, output: Path) -> Iterator[Record]:
    """Yield the items of files, patterns and directories, in an order that is always the same.

    The output may lie among them; it is passed over.

    Raises:
        ConfigError: An input does not exist, or a line is not JSON.
    """
    for name in inputs:
        if name == "-":
            yield from _parsed(sys.stdin, "-", "lines" if form == "auto" else form)
            continue
        for path in _expand(name):
            if path.resolve() != output.resolve():
                yield from _read_file(path, form, is_listed=Path(name).is_dir())


def _read_file(path: Path, form: str, *, is_listed: bool) -> Iterator[Record]:
    plain = path.with_suffix("") if path.suffix == ".gz" else path
    kind = form
    if form == "auto":
        kind = _BY_SUFFIX.get(plain.suffix, "files" if is_listed else "lines")
    if kind == "images" and path.suffix.lower() not in IMAGES:
        return
    if kind in {"files", "images"}:
        yield Record(str(path), 0, _stamp(path), str(path))
    elif kind == "parquet":
        yield from _rows_of_parquet(path)
    else:
        open_text: Any = open if plain == path else gzip.open
        with open_text(path, "rt", encoding="utf-8", newline="") as file:
            yield from _parsed(file, str(path), kind)


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


def _parsed(lines: Iterable[str], source: str, kind: str) -> Iterator[Record]:
    if kind == "csv":
        for number, row in enumerate(csv.DictReader(lines), 1):
            yield Record(source, number, _digest(repr(row)), row)
        return
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        try:
            item = json.loads(text) if kind == "jsonl" else text
        except ValueError as error:
            msg = f"line {number} of {source} is not JSON: {error}"
            raise ConfigError(msg) from error
        yield Record(source, number, _digest(text), item)


def _rows_of_parquet(path: Path) -> Iterator[Record]:
    stamp, batches = _stamp(path), import_extra("pyarrow.parquet").ParquetFile(path).iter_batches(1024)
    for number, row in enumerate((row for batch in batches for row in batch.to_pylist()), 1):
        yield Record(str(path), number, stamp, row)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _stamp(path: Path) -> str:
    """Return what changes when a file is written anew; its bytes would take as long as the work."""
    status = path.stat()
    return _digest(f"{status.st_size} {status.st_mtime_ns}")


def import_extra(name: str) -> Any:
    """Import a module that the extra ``files`` brings.

    Raises:
        ConfigError: It is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        msg = f"this kind of file needs {name.partition('.')[0]}; pip install tp-runner[files]"
        raise ConfigError(msg) from error
