"""The command `tp run`: a batch of items through a runner, from files to a file, with resume."""

import collections
import contextlib
import csv
import functools
import glob
import gzip
import hashlib
import importlib
import json
import os
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Self

import typer
from tp_core import resolve_devices
from tp_core.errors import ConfigError, StateError, TpError
from tp_core.files import Ownership, showing_system_errors, sync_folder, write_atomically
from tp_core.launching import check_process_count
from tp_core.messages import did_you_mean, file_meant, raised_where

from tp_runner import OrderedRunner, UnorderedRunner
from tp_runner.errors import ItemError

# -- Input ------------------------------------------------------------------------------------

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


class InputFile(NamedTuple):
    """A file, or standard input, and its format."""

    path: Path | None
    kind: str


def find(inputs: Sequence[str], form: str, *, outputs: Sequence[Path]) -> list[InputFile]:
    """Return the files of paths, patterns and directories, each once, in a fixed order.

    Outputs may lie among the files of patterns and directories; they are passed over.
    """
    found: dict[str, InputFile] = {}
    hidden = [path.resolve() for path in outputs]
    for name in inputs:
        if name == "-":
            if form == "parquet":
                msg = "--format parquet needs a file that can be searched; write standard input to one first"
                raise ConfigError(msg)
            kind = "lines" if form == "auto" else form
            found[name] = InputFile(None, kind)
            continue
        for path in _expand(name):
            real, is_named = path.resolve(), path == Path(name)
            kind = _kind_of(path, form, is_listed=Path(name).is_dir())
            if any(real == output or output in real.parents for output in hidden):
                if is_named:
                    msg = f"--input {name} is the output too, which would take its place; name another output"
                    raise ConfigError(msg)
            elif is_named or kind != "images" or path.suffix.lower() in IMAGES:
                found.setdefault(str(real), InputFile(path, kind))
    for kind, module in (("parquet", "pyarrow.parquet"), ("images", "PIL.Image")):
        if any(source.kind == kind for source in found.values()):
            import_extra(module)
    return list(found.values())


def read(sources: Iterable[InputFile]) -> Iterator[Record]:
    for path, kind in sources:
        try:
            yield from _parse(sys.stdin, "-", kind) if path is None else _records_of(path, kind)
        except ConfigError:
            raise
        except (OSError, EOFError, ValueError, csv.Error, zlib.error) as error:  # ValueError: pyarrow's, too
            msg = f"{path or 'standard input'} cannot be read as {kind}: {type(error).__name__}: {error}"
            raise ConfigError(msg) from error


def _kind_of(path: Path, form: str, *, is_listed: bool) -> str:
    if form != "auto":
        return form
    default = "files" if is_listed else "lines"
    return _BY_SUFFIX.get(_without_gz(path).suffix, default)


def _without_gz(path: Path) -> Path:
    return path.with_suffix("") if path.suffix == ".gz" else path


def _records_of(path: Path, kind: str) -> Iterator[Record]:
    if kind in {"files", "images"}:
        yield Record(str(path), 0, _stamp(path), str(path))
    elif kind == "parquet":
        yield from _rows_of_parquet(path)
    else:
        open_text: Any = open if _without_gz(path) == path else gzip.open
        # utf-8-sig: spreadsheets begin with a byte order mark, which is no part of the first value.
        with open_text(path, "rt", encoding="utf-8-sig", newline="") as file:
            yield from _parse(file, str(path), kind)


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
    found = sorted(Path(match) for match in glob.glob(name, recursive=True))  # noqa: PTH207 - it may be absolute
    if not found:
        msg = f"no file, directory or pattern {name!r}; nothing matches it{file_meant(path)}"
        raise ConfigError(msg)
    return [path for path in found if path.is_file()]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _parse(lines: Iterable[str], source: str, kind: str) -> Iterator[Record]:
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
    stamp = _stamp(path)
    number = 0
    for batch in import_extra("pyarrow.parquet").ParquetFile(path).iter_batches(1024):
        for row in batch.to_pylist():
            number += 1
            yield Record(str(path), number, stamp, row)


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _stamp(path: Path) -> str:
    """Return a hash of size and time of a file; to read its bytes would take as long as the work."""
    status = path.stat()
    return _digest(f"{status.st_size} {status.st_mtime_ns}")


def import_extra(name: str) -> Any:
    """Import a module that the extra ``files`` brings."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        msg = f"this kind of file needs {name.partition('.')[0]}; pip install tp-runner[files]"
        raise ConfigError(msg) from error


# -- The journal ------------------------------------------------------------------------------


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

    def __init__(self, path: Path) -> None:
        self.n_before = 0  # how many items were done before
        self.n_again = 0  # how many had failed before, and are tried again
        self.n_replaced = 0  # how many were done before, and have been replaced
        self.n_now = 0  # how many lines were written
        self.n_failed = 0  # how many of those are errors
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
        """Read the done items; leave only their lines in the file."""
        end = 0
        with self._path.open("rb") as file:
            for number, text in enumerate(file, 1):
                if not text.endswith(b"\n"):
                    break
                line = self._parse(text, number)
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
            self._fd = self._open()  # _keep has put a new file in place of the old one

    def _open(self) -> int:
        """Open the file to append to it, and no link, which a stranger may have put there."""
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0)
        return os.open(self._path, flags, 0o666)

    def _keep(self, is_kept: Callable[[_Line], bool]) -> None:
        """Leave only some lines in the file, in one step."""

        def write(part: Path) -> None:
            with self._path.open("rb") as file, part.open("wb") as new:
                new.writelines(text for i, text in enumerate(file, 1) if is_kept(self._parse(text, i)))

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

    def write(self, record: Record, result: Any, *, keep_going: bool) -> None:
        """Add the result of a record, or the error in its place."""
        entry: dict[str, Any] = {"source": record.source, "line": record.line, "input": record.digest}
        if isinstance(result, BaseException):
            line = json.dumps({**entry, "error": _error_entry(result)})
            self.n_failed += 1
        else:
            try:
                line = json.dumps({**entry, "result": result}, default=_to_plain, allow_nan=False)
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
        # One write of a whole line, so that it is there or not, even if this process is killed.
        with saving(self._path):
            rest = memoryview(line.encode() + b"\n")
            while rest:  # a pipe, or a full disk, may take only a part
                rest = rest[os.write(self._fd, rest) :]
        self.n_now += 1
        key = _key(record.source, record.line)
        if key in self._done:
            self._done[key] = record.digest
            self._has_stale = True

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


# -- Tables and pictures ----------------------------------------------------------------------

_WRITTEN = {".csv", ".parquet"}


def journal_of(output: Path) -> Path:
    """Return where results are kept line by line: the output itself, or a hidden file beside or in it."""
    if str(output) == "-" or output.suffix in {".jsonl", ".ndjson"}:
        return Path(os.path.realpath(output)) if output.is_symlink() else output  # a link that the user made
    if is_folder(output):
        return output / ".tp-run.jsonl"
    if output.suffix in _WRITTEN:
        return output.with_name(f".{output.name}.jsonl")
    msg = f"--output {output} must end in .jsonl, .csv or .parquet, be a folder for images, or - alone"
    raise ConfigError(msg)


def is_folder(output: Path) -> bool:
    return output.is_dir() or (not output.suffix and str(output) != "-")


def write_table(journal: Path, output: Path) -> None:
    """Write the journal as a table, whole or not at all.

    A dictionary's entries are columns, any other result is the column ``result``.
    """
    if output.suffix not in _WRITTEN or journal == output:
        return
    write = _write_csv if output.suffix == ".csv" else _write_parquet
    write_atomically(partial(write, journal), output)


def _write_csv(journal: Path, part: Path) -> None:
    with part.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, _columns(rows_of(journal)))
        writer.writeheader()
        writer.writerows(rows_of(journal))


def _write_parquet(journal: Path, part: Path) -> None:
    pyarrow = import_extra("pyarrow")
    rows = list(rows_of(journal))
    columns: dict[str, list[Any]] = {}
    for name in _columns(rows):
        columns[name] = [row.get(name) for row in rows]
    try:
        table = pyarrow.table(columns)
    except (ValueError, TypeError, NotImplementedError) as error:  # pyarrow's are these, too
        msg = f"the results do not fit into the columns of a table: {error}; they are all in {journal}"
        raise StateError(msg) from error
    import_extra("pyarrow.parquet").write_table(table, part)


def _columns(rows: Iterable[dict[str, Any]]) -> list[str]:
    names = {"source": None, "line": None}  # a dict, which keeps the order of the columns
    for row in rows:
        names |= dict.fromkeys(row)
    return list(names)


def rows_of(journal: Path) -> Iterator[dict[str, Any]]:
    with journal.open(encoding="utf-8") as file:
        for line in file:
            entry = json.loads(line)
            row = {"source": entry["source"], "line": entry["line"]}
            if "error" in entry:
                row["error"] = f"{entry['error']['type']}: {entry['error']['message']}"
            elif isinstance(entry["result"], dict):
                row |= entry["result"]
            else:
                row["result"] = entry["result"]
            yield row


def with_images(
    work: Callable[[Any], Any], *, reads: bool, folder: Path | None, batched: bool
) -> Callable[[Any], Any]:
    """Wrap work on pictures as work on the paths of their files.

    Args:
        work: The function of an item, or of a batch.
        reads: Whether it gets pictures, as ``PIL.Image`` in RGB, instead of paths.
        folder: Where to write results, which are pictures then; the new result is the file's path.
        batched: Whether an item is a list of paths.
    """

    def one(path: str) -> Any:
        return _open(path) if reads else path

    def wrapped(item: Any) -> Any:
        if not batched:
            result = work(one(item))
            return result if folder is None else _save(result, folder, item)
        results = work([one(path) for path in item])
        if folder is None:
            return results
        return [_save(result, folder, path) for result, path in zip(results, item, strict=True)]

    return wrapped


def _open(path: str) -> Any:
    with import_extra("PIL.Image").open(path) as image:
        return image.convert("RGB")


def require_apart(source: str, folder: Path, taken: dict[Path, str]) -> None:
    """Refuse a source if another source's picture is saved to the same file, and would be lost."""
    path = _picture_of(source, folder)
    other = taken.setdefault(path, source)
    if other != source and os.path.realpath(other) != os.path.realpath(source):
        msg = (
            f"the pictures of {other} and {source} would both be saved as {path}; rename one of the files, "
            "or give it to a run with another folder as --output"
        )
        raise ConfigError(msg)


def _picture_of(source: str, folder: Path) -> Path:
    name = source if source.endswith(".png") else f"{source}.png"
    return folder.joinpath(*(part for part in Path(name).parts if part not in {"/", ".."}))


def _save(picture: Any, folder: Path, source: str) -> str:
    """Write a picture, or an array of bytes of (height, width, 3) or (height, width), as PNG."""
    if not hasattr(picture, "save"):
        array = picture.numpy() if hasattr(picture, "numpy") else picture
        picture = import_extra("PIL.Image").fromarray(array)
    path = _picture_of(source, folder)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not by write_atomically, which lists the folder each time: here the folder has all results.
    kept = path.with_name(f".{path.name}.kept")
    kept.unlink(missing_ok=True)  # left by a killed process, or a link that somebody made
    with showing_system_errors(path), kept.open("xb") as file:
        picture.save(file, format="PNG")
        file.flush()
        os.fsync(file.fileno())
    kept.replace(path)
    sync_folder(path.parent)
    return str(path)


# -- The command `tp run`: a batch of items through a runner, from files to a file, with resume ----


app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    runner: Annotated[str, typer.Argument(help="module:Runner, or file.py:function.")],
    inputs: Annotated[
        list[str],
        typer.Option("--input", help="A file, a pattern, a directory, or - for standard input; repeatable."),
    ],
    output: Annotated[
        Path,
        typer.Option(help="NAME.jsonl, NAME.csv, NAME.parquet, a folder for images, or - for JSON lines."),
    ],
    more: Annotated[
        list[str] | None, typer.Argument(help="More input files, as a shell expands a pattern.")
    ] = None,
    devices: Annotated[
        str, typer.Option(help="auto (accelerators, or all cores), a number of CPU workers, or cuda:0,cuda:1")
    ] = "auto",
    form: Annotated[
        str, typer.Option("--format", help=f"{', '.join(FORMATS)}; auto goes by the name.")
    ] = "auto",
    batch: Annotated[int | None, typer.Option(help="Items that the runner gets at once.")] = None,
    max_retries: Annotated[int, typer.Option(help="How often a failed item is tried again.")] = 0,
    retry_delay_s: Annotated[
        float | None, typer.Option(help="Seconds before that, twice as many each time.")
    ] = None,
    max_restarts: Annotated[int, typer.Option(help="How often dead workers are started again.")] = 10,
    timeout_s: Annotated[float | None, typer.Option(help="The most time for one item.")] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Write errors in place of results and continue.")
    ] = False,
    timeline: Annotated[
        Path | None, typer.Option(help="Where to write what each worker did when, for a trace viewer.")
    ] = None,
    progress: Annotated[bool, typer.Option(help="Show a progress bar, and at the end a summary.")] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON for machines.")] = False,
) -> None:
    """Run every item of the input through a runner.

    Each line or row of the output has the item's source and number and its result. Called again after an
    interruption, the command continues where it was: no item is lost or done twice in the output. Items that
    failed are tried again, those that are others now are done again. The exit status is 1 if items failed.
    Hidden files of a directory are passed over.
    """
    request = RunRequest(
        runner=runner,
        inputs=(*inputs, *(more or ())),
        output=output,
        form=form,
        devices=devices,
        batch=batch,
        max_retries=max_retries,
        retry_delay_s=retry_delay_s,
        max_restarts=max_restarts,
        timeout_s=timeout_s,
        keep_going=keep_going,
        timeline=timeline,
        progress=progress,
        as_json=as_json,
    )
    journal = _run_request(request)
    if as_json:
        typer.echo(json.dumps({"output": str(output), **journal.counts()}, indent=2))
    else:
        _report(journal, output)
    if journal.n_failed:
        raise typer.Exit(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRequest:
    """The arguments of ``tp run``; the help of its options describes each.

    Raises:
        ConfigError: Arguments contradict each other, or name what cannot be.
    """

    runner: str
    inputs: tuple[str, ...]
    output: Path
    form: str
    devices: str
    batch: int | None
    max_retries: int
    retry_delay_s: float | None
    max_restarts: int
    timeout_s: float | None
    keep_going: bool
    timeline: Path | None
    progress: bool
    as_json: bool

    def __post_init__(self) -> None:
        if self.form not in FORMATS:
            meant = did_you_mean(self.form, FORMATS)
            msg = f"--format must be one of {', '.join(FORMATS)}, got {self.form!r}{meant}"
            raise ConfigError(msg)
        if self.retry_delay_s is not None and not self.max_retries:
            msg = "--retry-delay-s is about items that are tried again; give --max-retries too"
            raise ConfigError(msg)
        if self.as_json and self.is_stdout:
            msg = "--json prints its document where --output - has the results; name a file for these"
            raise ConfigError(msg)
        timeline = self.timeline
        if timeline is not None and (timeline.is_dir() or not timeline.absolute().parent.is_dir()):
            msg = f"--timeline must be a file in a folder that is there, got {str(timeline)!r}"
            raise ConfigError(msg)
        if self.folder is not None and self.form not in {"images", "files"}:
            msg = (
                f"--output {self.output} is a folder, which takes one picture for each file: give "
                "--format images"
            )
            raise ConfigError(msg)

    @property
    def is_stdout(self) -> bool:
        """Whether results go to standard output."""
        return str(self.output) == "-"

    @property
    def folder(self) -> Path | None:
        """The folder for pictures, or ``None`` where the output is a file."""
        return self.output if is_folder(self.output) else None

    @property
    def journal(self) -> Path:
        """The file with the results, line by line."""
        return journal_of(self.output)

    def runner_class(self) -> type[OrderedRunner]:
        """Return the runner class, wrapped where it reads or writes pictures."""
        with contextlib.redirect_stdout(sys.stderr):
            kind = _load(self.runner)
        reads = self.form == "images"
        if reads or self.folder is not None:
            return _image_runner(kind, reads=reads, folder=self.folder, batched=self.batch is not None)
        return kind

    def runner_options(self) -> dict[str, Any]:
        """Return the keyword arguments of the runner."""
        on_error = "return" if self.keep_going else "raise"
        progress = "auto" if self.progress else False
        return {
            "batch": self.batch,
            "max_retries": self.max_retries,
            "retry_delay_s": self.retry_delay_s,
            "max_restarts": self.max_restarts,
            "on_error": on_error,
            "timeout_s": self.timeout_s,
            "progress": progress,
            "timeline": True,
        }


def _run_request(request: RunRequest) -> Journal:
    """Run every item that is not done, and write the results; return the journal, which is closed."""
    kind = request.runner_class()
    file = request.journal
    sources = find(request.inputs, request.form, outputs=[request.output, file])
    # Before any work: a missing library would otherwise be named after hours of it.
    if request.output.suffix == ".parquet":
        import_extra("pyarrow.parquet")
    if request.folder is not None:
        import_extra("PIL.Image")
    records: collections.deque[Record] = collections.deque()  # those on their way, oldest first
    keeps_stdout = request.as_json or request.is_stdout
    with owned(file):
        with (
            Journal(file) as journal,
            _reserve_stdout() if keeps_stdout else contextlib.nullcontext(),
            _report_failure(journal, records, request.output),
        ):
            items = _items_to_do(request, sources, journal, records)
            with kind(_devices(request.devices), **request.runner_options()) as running:
                for result in running.stream(items):
                    journal.write(records.popleft(), result, keep_going=request.keep_going)
                if request.timeline is not None:
                    running.write_timeline(request.timeline)
                if request.progress and journal.n_now:
                    typer.echo(f"{running.stats()}\n{running.draw_timeline()}", err=True)
        with saving(request.output):
            write_table(file, request.output)
    return journal


def _items_to_do(
    request: RunRequest, sources: Sequence[InputFile], journal: Journal, records: collections.deque[Record]
) -> Iterator[Any]:
    """Return an iterator over the items that are not done; each one's record is added to ``records``.

    Two sources whose pictures have one name are refused: those that are known, at once, before any work.
    """
    folder = request.folder
    taken: dict[Path, str] = {}
    if folder is not None:
        done = [row["source"] for row in rows_of(request.journal)]
        named = [str(source.path) for source in sources if source.path is not None]
        for name in (*done, *named):
            if name != "-":
                require_apart(name, folder, taken)

    def items() -> Iterator[Any]:
        for record in read(sources):
            if journal.has(record):
                continue
            if folder is not None:  # and those that standard input names
                require_apart(record.item, folder, taken)
            records.append(record)
            yield record.item

    return items()


@contextlib.contextmanager
def _reserve_stdout() -> Iterator[None]:
    """Keep standard output for the command: output of runners, also from workers, goes to stderr."""
    # The descriptor and not only sys.stdout: worker processes inherit it.
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(kept, 1)
        os.close(kept)


@contextlib.contextmanager
def _report_failure(journal: Journal, records: Sequence[Record], output: Path) -> Iterator[None]:
    """Report the progress of a run that an error ends, and the line of the failed item."""
    try:
        yield
    except ItemError as error:
        _report(journal, output)
        where = ""
        if error.index is not None:
            record = records[error.index - journal.n_now]
            where = f"{record.source}{f', line {record.line}' if record.line else ''}: "
        msg = f"{where}{error}\n--keep-going writes errors in place of results, and continues"
        raise TpError(msg) from error
    except BaseException:
        if journal.n_now:
            _report(journal, output)
        raise


def _report(journal: Journal, output: Path) -> None:
    again = [
        f"{count} had {what} before"
        for count, what in ((journal.n_again, "failed"), (journal.n_replaced, "been others"))
        if count
    ]
    note = f" ({', '.join(again)})" if again else ""
    counts = f"{journal.n_before} done before, {journal.n_now} now{note}, {journal.n_failed} of them failed"
    typer.echo(f"{counts}: {output}", err=True)


def _load(name: str) -> type[OrderedRunner]:
    """Return the runner class called ``module:name``, or make one of a function."""
    module_name, _, attribute = name.partition(":")
    if not attribute:
        msg = f"the runner must be given as module:Runner, got {name!r}"
        raise ConfigError(msg)
    file = Path(module_name)
    if file.suffix == ".py" and not file.is_file():
        msg = f"no runner {name!r}: there is no file {module_name!r}{file_meant(file)}"
        raise ConfigError(msg)
    # The workers import it, too: a file by its module name, from its folder.
    folder, importable = Path.cwd(), module_name
    if file.suffix == ".py":
        folder, importable = file.parent.resolve(), file.stem
    here = str(folder)
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(importable)
    except ImportError as error:
        meant = file_meant(Path(here, f"{module_name}.py")) if error.name == module_name else ""
        msg = f"no runner {name!r}: {error}; it is looked for from {here}{meant}"
        raise ConfigError(msg) from error
    except Exception as error:
        msg = f"no runner {name!r}: {module_name} cannot be imported: it raised {raised_where(error)}"
        raise ConfigError(msg) from error
    try:
        found = getattr(module, attribute)
    except AttributeError as error:
        own = [key for key, value in vars(module).items() if callable(value)]
        msg = f"no runner {name!r}: {error}{did_you_mean(attribute, own)}"
        raise ConfigError(msg) from error
    if isinstance(found, type) and issubclass(found, OrderedRunner | UnorderedRunner):
        # The journal needs results in the order of the items; the base that comes first decides it.
        return found if issubclass(found, OrderedRunner) else type("Run", (OrderedRunner, found), {})
    if callable(found) and not isinstance(found, type):
        work = staticmethod(lambda device, cfg, item: found(item))  # noqa: ARG005 - the runner's protocol
        return type("Run", (OrderedRunner,), {"producer_work": work})
    msg = f"{name!r} is neither a runner class nor a function, but {found!r}"
    raise ConfigError(msg)


def _image_runner(
    kind: type[OrderedRunner], *, reads: bool, folder: Path | None, batched: bool
) -> type[OrderedRunner]:
    """Return a subclass of a runner that reads pictures from files, or writes them to files."""

    def work(device: str, cfg: Any, item: Any) -> Any:
        inner = functools.partial(kind.producer_work, device, cfg)
        return with_images(inner, reads=reads, folder=folder, batched=batched)(item)

    return type("Run", (kind,), {"producer_work": staticmethod(work)})


def _devices(text: str) -> Any:
    if text == "auto":  # the accelerators, or a CPU worker for each core
        devices = [str(device) for device in resolve_devices("auto")]
        return None if devices == ["cpu"] else devices
    if text.isdigit():
        check_process_count("--devices", int(text))
        return int(text)
    return text.split(",") if "," in text else text
