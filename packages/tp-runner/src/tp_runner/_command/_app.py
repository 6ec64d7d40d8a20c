"""The arguments of ``tp run``, and the run itself."""

import collections
import contextlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from tp_core import resolve_devices
from tp_core.errors import ConfigError, TpError
from tp_core.launching import check_process_count
from tp_core.messages import did_you_mean

from tp_runner import OrderedRunner
from tp_runner._command._journal import Journal, owned, saving
from tp_runner._command._pictures import check_unique_picture
from tp_runner._command._records import FORMATS, InputFile, Record, find_inputs, import_extra, read_records
from tp_runner._command._runner_class import image_runner, load_runner
from tp_runner._command._tables import is_folder, is_table, journal_of, rows_of, write_table
from tp_runner.errors import ItemError

# -- The arguments --------------------------------------------------------------------------------

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
        if is_folder(self.output):
            return self.output
        return None

    @property
    def journal(self) -> Path:
        """The file with the results, line by line."""
        return journal_of(self.output)

    def runner_class(self) -> type[OrderedRunner]:
        """Return the runner class, wrapped where it reads or writes pictures."""
        with contextlib.redirect_stdout(sys.stderr):
            runner = load_runner(self.runner)
        reads = self.form == "images"
        if reads or self.folder is not None:
            return image_runner(runner, reads=reads, folder=self.folder, batched=self.batch is not None)
        return runner

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


# -- The run --------------------------------------------------------------------------------------


def _run_request(request: RunRequest) -> Journal:
    """Run every item that is not done, and write the results; return the journal, which is closed."""
    runner = request.runner_class()
    file = request.journal
    inputs = find_inputs(request.inputs, request.form, outputs=[request.output, file])
    # Before any work: a missing library would otherwise be named after hours of it.
    if request.output.suffix == ".parquet":
        import_extra("pyarrow.parquet")
    if request.folder is not None:
        import_extra("PIL.Image")
    records: collections.deque[Record] = collections.deque()  # those on their way, oldest first
    keeps_stdout = request.as_json or request.is_stdout
    with owned(file):
        with (
            Journal(file, allow_nan=is_table(request.output)) as journal,
            _reserve_stdout() if keeps_stdout else contextlib.nullcontext(),
            _report_failure(journal, records, request.output),
        ):
            items = _items_to_do(request, inputs, journal, records)
            with runner(_devices(request.devices), **request.runner_options()) as running:
                for result in running.stream(items):
                    journal.write_unreadable(records)
                    journal.write(records.popleft(), result, keep_going=request.keep_going)
                journal.write_unreadable(records)
                if request.timeline is not None:
                    running.write_timeline(request.timeline)
                if request.progress and journal.n_now:
                    typer.echo(f"{running.stats()}\n{running.draw_timeline()}", err=True)
        with saving(request.output):
            write_table(file, request.output)
    return journal


def _items_to_do(
    request: RunRequest, inputs: Sequence[InputFile], journal: Journal, records: collections.deque[Record]
) -> Iterator[Any]:
    """Return an iterator over the items that are not done; each one's record is added to ``records``.

    Two sources whose pictures have one name are refused: those that are known, at once, before any work.
    """
    folder = request.folder
    taken: dict[Path, str] = {}  # the source of each picture
    if folder is not None:
        done = [row["source"] for row in rows_of(request.journal)]
        named = [str(source.path) for source in inputs if source.path is not None]
        for name in (*done, *named):
            if name != "-":
                check_unique_picture(name, folder, taken)

    def items() -> Iterator[Any]:
        for record in read_records(inputs):
            if record.error is not None:
                if not request.keep_going:
                    raise record.error
                records.append(record)
                continue
            if journal.has(record):
                continue
            if folder is not None:  # and those that standard input names
                check_unique_picture(record.item, folder, taken)
            records.append(record)
            yield record.item

    return items()


@contextlib.contextmanager
def _reserve_stdout() -> Iterator[None]:
    """Keep standard output for the command: output of runners, also from workers, goes to stderr."""
    # The descriptor and not only sys.stdout: worker processes inherit it.
    stdout = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)


@contextlib.contextmanager
def _report_failure(journal: Journal, records: Sequence[Record], output: Path) -> Iterator[None]:
    """Report the progress of a run that an error ends, and the line of the failed item."""
    try:
        yield
    except ItemError as error:
        _report(journal, output)
        where = ""
        if error.index is not None:
            readable = [record for record in records if record.error is None]
            record = readable[error.index - journal.n_delivered]
            line = f", line {record.line}" if record.line else ""
            where = f"{record.source}{line}: "
        msg = f"{where}{error}\n--keep-going writes errors in place of results, and continues"
        raise TpError(msg) from error
    except BaseException:
        if journal.n_now:
            _report(journal, output)
        raise


def _report(journal: Journal, output: Path) -> None:
    again = []
    if journal.n_again:
        again.append(f"{journal.n_again} had failed before")
    if journal.n_replaced:
        again.append(f"{journal.n_replaced} had been others before")
    note = f" ({', '.join(again)})" if again else ""
    counts = f"{journal.n_before} done before, {journal.n_now} now{note}, {journal.n_failed} of them failed"
    typer.echo(f"{counts}: {output}", err=True)


def _devices(text: str) -> Any:
    """Return the devices of a runner: their names, a number of CPU workers, or ``None`` for all cores."""
    if text == "auto":
        devices = [str(device) for device in resolve_devices("auto")]
        if devices == ["cpu"]:
            return None
        return devices
    if text.isdigit():
        check_process_count("--devices", int(text))
        return int(text)
    if "," in text:
        return text.split(",")
    return text
