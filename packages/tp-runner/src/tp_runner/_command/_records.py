"""The input of ``tp run``: the files that are meant, and the items in them."""

import csv
import glob
import gzip
import hashlib
import importlib
import io
import json
import sys
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tp_core.errors import ConfigError
from tp_core.messages import file_meant

FORMATS = ("auto", "jsonl", "lines", "csv", "parquet", "files", "images")
IMAGES = {".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"}
_BY_SUFFIX = {".jsonl": "jsonl", ".ndjson": "jsonl", ".csv": "csv", ".parquet": "parquet", ".txt": "lines"}


@dataclass(frozen=True, slots=True)
class Record:
    """An item and where it came from."""

    source: str
    line: int  # the number of the line or row in it, from 1; 0 for a whole file
    digest: str  # a hash of the item; it changes when another item takes its place
    item: Any  # the parsed JSON value, the line without its end, the row as a dictionary, or the file's path
    error: ConfigError | None = None  # why there is no item: the line cannot be read


class InputFile(NamedTuple):
    """A file, or standard input, and its format."""

    path: Path | None
    form: str


# -- The files that arguments name ----------------------------------------------------------------


def find_inputs(names: Sequence[str], form: str, *, outputs: Sequence[Path]) -> list[InputFile]:
    """Return the files of paths, patterns and directories, each once, in a fixed order.

    Outputs may lie among the files of patterns and directories; they are passed over.
    """
    inputs: dict[str, InputFile] = {}  # by their real paths
    real_outputs = [path.resolve() for path in outputs]
    for name in names:
        if name == "-":
            inputs[name] = _standard_input(form)
            continue
        for path in _expand(name):
            real = path.resolve()
            is_named = path == Path(name)
            path_form = _form_of(path, form, is_listed=Path(name).is_dir())
            if any(real == output or output in real.parents for output in real_outputs):
                if is_named:
                    msg = f"--input {name} is the output too, which would take its place; name another output"
                    raise ConfigError(msg)
            elif is_named or path_form != "images" or path.suffix.lower() in IMAGES:
                inputs.setdefault(str(real), InputFile(path, path_form))
    # Before any work: a missing library would otherwise be named after hours of it.
    forms = {source.form for source in inputs.values()}
    if "parquet" in forms:
        import_extra("pyarrow.parquet")
    if "images" in forms:
        import_extra("PIL.Image")
    return list(inputs.values())


def _standard_input(form: str) -> InputFile:
    if form == "parquet":
        msg = "--format parquet needs a file that can be searched; write standard input to one first"
        raise ConfigError(msg)
    if form == "auto":
        form = "lines"
    return InputFile(None, form)


def _form_of(path: Path, form: str, *, is_listed: bool) -> str:
    if form != "auto":
        return form
    default = "files" if is_listed else "lines"
    return _BY_SUFFIX.get(_without_gz(path).suffix, default)


def _without_gz(path: Path) -> Path:
    if path.suffix == ".gz":
        return path.with_suffix("")
    return path


def _expand(name: str) -> list[Path]:
    path = Path(name)
    if not name:
        msg = "--input is empty; give a file, a pattern, a directory (. is this one), or - for standard input"
        raise ConfigError(msg)
    if path.is_dir():
        files = sorted(child for child in path.rglob("*") if child.is_file())
        return [file for file in files if not _is_hidden(file.relative_to(path))]
    if path.exists():
        return [path]
    matches = sorted(Path(match) for match in glob.glob(name, recursive=True))  # noqa: PTH207 - it may be absolute
    if not matches:
        msg = f"no file, directory or pattern {name!r}; nothing matches it{file_meant(path)}"
        raise ConfigError(msg)
    return [match for match in matches if match.is_file()]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


# -- The items in them ----------------------------------------------------------------------------


def read_records(inputs: Iterable[InputFile]) -> Iterator[Record]:
    """Yield the items; a line that cannot be read has its error, and those after it follow."""
    for path, form in inputs:
        try:
            if path is None:
                if isinstance(sys.stdin, io.TextIOWrapper):
                    sys.stdin.reconfigure(errors="surrogateescape")  # as below
                yield from _parse(sys.stdin, "-", form)
            else:
                yield from _records_of(path, form)
        except ConfigError:
            raise
        except (OSError, EOFError, ValueError, csv.Error, zlib.error) as error:  # ValueError: pyarrow's, too
            msg = f"{path or 'standard input'} cannot be read as {form}: {type(error).__name__}: {error}"
            raise ConfigError(msg) from error


def _records_of(path: Path, form: str) -> Iterator[Record]:
    if form in {"files", "images"}:
        yield Record(str(path), 0, _stamp(path), str(path))
    elif form == "parquet":
        yield from _parse_parquet(path)
    else:
        open_text: Any = open if _without_gz(path) == path else gzip.open
        # utf-8-sig: spreadsheets begin with a byte order mark, which is no part of the first value.
        # Bytes that are no UTF-8 become surrogates, which UTF-8 has none of: so each line is judged alone.
        with open_text(path, "rt", encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            yield from _parse(file, str(path), form)


def _parse(lines: Iterable[str], source: str, form: str) -> Iterator[Record]:
    if form == "csv":
        yield from _parse_csv(lines, source)
        return
    for number, line in enumerate(lines, 1):
        text = line.rstrip("\r\n")
        if not text.strip():
            continue
        item = text
        error = _not_decoded(text, f"line {number} of {source}")
        if form == "jsonl" and error is None:
            try:
                item = json.loads(text)
            except ValueError as cause:
                error = ConfigError(f"line {number} of {source} is not JSON: {cause}")
        yield Record(source, number, _digest(text), item, error)


def _parse_csv(lines: Iterable[str], source: str) -> Iterator[Record]:
    csv.field_size_limit(sys.maxsize)  # a cell may be a whole document
    for number, row in enumerate(csv.DictReader(lines), 1):
        error = _not_decoded("".join(map(str, row.values())), f"row {number} of {source}")
        if None in row:
            msg = f"row {number} of {source} has more values than there are columns: {row[None]!r}"
            error = ConfigError(msg)
        yield Record(source, number, _digest(repr(row)), row, error)


def _not_decoded(text: str, where: str) -> ConfigError | None:
    """Return the error of a text with bytes that are no UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        bad = text[error.start : error.end].encode(errors="surrogateescape")
        return ConfigError(f"{where} is not UTF-8: it has {bad!r} after {error.start} characters")
    return None


def _parse_parquet(path: Path) -> Iterator[Record]:
    stamp = _stamp(path)
    number = 0
    for batch in import_extra("pyarrow.parquet").ParquetFile(path).iter_batches(1024):
        for row in batch.to_pylist():
            number += 1
            yield Record(str(path), number, stamp, row)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=8).hexdigest()


def _stamp(path: Path) -> str:
    """Return a hash of size and time of a file; to read its bytes would take as long as the work."""
    status = path.stat()
    return _digest(f"{status.st_size} {status.st_mtime_ns}")


def import_extra(name: str) -> Any:
    """Import a module that the extra ``files`` brings."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        msg = f"this kind of file needs {name.partition('.')[0]}; pip install 'tp-runner[files]'"
        raise ConfigError(msg) from error
