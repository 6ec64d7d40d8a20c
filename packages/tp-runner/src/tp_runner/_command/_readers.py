"""Reading items from files: JSON lines, lines of text, tables, or whole files of a directory."""

import csv
import glob
import gzip
import hashlib
import importlib
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tp_core.errors import ConfigError
from tp_core.internal import file_meant

__all__ = ["FORMATS", "Record", "Source", "find", "import_extra", "read"]

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


class Source(NamedTuple):
    """A file, or standard input, and what it is read as."""

    path: Path | None
    kind: str


def find(inputs: Sequence[str], form: str, *, outputs: Sequence[Path]) -> list[Source]:
    """Return what files, patterns and directories name, each once, in an order that is always the same.

    Outputs may lie among the files of patterns and directories; they are passed over.

    Raises:
        ConfigError: An input does not exist, is the output too, or needs a package that is not installed.
    """
    found: dict[str, Source] = {}
    hidden = [path.resolve() for path in outputs]
    for name in inputs:
        if name == "-":
            if form == "parquet":
                msg = "--format parquet needs a file that can be searched; write standard input to one first"
                raise ConfigError(msg)
            found[name] = Source(None, "lines" if form == "auto" else form)
            continue
        for path in _expand(name):
            real, is_named = path.resolve(), path == Path(name)
            kind = _kind_of(path, form, is_listed=Path(name).is_dir())
            if any(real == output or output in real.parents for output in hidden):
                if is_named:
                    msg = f"--input {name} is the output too, which would take its place; name another output"
                    raise ConfigError(msg)
            elif is_named or kind != "images" or path.suffix.lower() in IMAGES:
                found.setdefault(str(real), Source(path, kind))
    for kind, module in (("parquet", "pyarrow.parquet"), ("images", "PIL.Image")):
        if any(source.kind == kind for source in found.values()):
            import_extra(module)
    return list(found.values())


def read(sources: Iterable[Source]) -> Iterator[Record]:
    """Yield the items of files.

    Raises:
        ConfigError: A file cannot be read as what it is said to be.
    """
    for path, kind in sources:
        try:
            yield from _parsed(sys.stdin, "-", kind) if path is None else _records_of(path, kind)
        except ConfigError:
            raise
        except (OSError, EOFError, ValueError, csv.Error, zlib.error) as error:  # ValueError: pyarrow's, too
            msg = f"{path or 'standard input'} cannot be read as {kind}: {type(error).__name__}: {error}"
            raise ConfigError(msg) from error


def _kind_of(path: Path, form: str, *, is_listed: bool) -> str:
    if form != "auto":
        return form
    return _BY_SUFFIX.get(_without_gz(path).suffix, "files" if is_listed else "lines")


def _without_gz(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == ".gz" else path


def _records_of(path: Path, kind: str) -> Iterator[Record]:
    if kind in {"files", "images"}:
        yield Record(str(path), 0, _stamp(path), str(path))
    elif kind == "parquet":
        yield from _rows_of_parquet(path)
    else:
        open_text: Any = open if _without_gz(path) == path else gzip.open
        # Spreadsheets write a mark of the byte order at the beginning.
        with open_text(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield from _parsed(file, str(path), kind)


def _expand(name: str) -> list[Path]:
    path = Path(name)
    if not name:
        msg = "--input is empty; give a file, a pattern, a directory (. is this one), or - for standard input"
        raise ConfigError(msg)
    if path.is_dir():
        files = sorted(child for child in path.rglob("*") if child.is_file())
        return [file for file in files if not any(p.startswith(".") for p in file.relative_to(path).parts)]
    if path.exists():
        return [path]
    found = sorted(Path(match) for match in glob.glob(name, recursive=True))  # noqa: PTH207 - it may be absolute
    if not found:
        msg = f"no file, directory or pattern {name!r}; nothing matches it{file_meant(path)}"
        raise ConfigError(msg)
    return [path for path in found if path.is_file()]


def _parsed(lines: Iterable[str], source: str, kind: str) -> Iterator[Record]:
    if kind == "csv":
        csv.field_size_limit(sys.maxsize)  # a cell may be a whole document
        for number, row in enumerate(csv.DictReader(lines), 1):
            if None in row:
                msg = f"row {number} of {source} has more values than there are columns: {row[None]!r}"
                raise ConfigError(msg)
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
        ConfigError: The module is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        msg = f"this kind of file needs {name.partition('.')[0]}; pip install tp-runner[files]"
        raise ConfigError(msg) from error
