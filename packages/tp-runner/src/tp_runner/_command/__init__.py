"""The command `tp run`: a batch of items through a runner, from files to a file, with resume."""

import collections
import contextlib
import functools
import importlib
import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from tp_core import resolve_devices
from tp_core.errors import ConfigError, TpError
from tp_core.internal import check_process_count, did_you_mean, file_meant, raised_where

from tp_runner import OrderedRunner, UnorderedRunner
from tp_runner._command._files import (
    FORMATS,
    Journal,
    Record,
    find,
    import_extra,
    is_folder,
    journal_of,
    owned,
    read,
    require_apart,
    rows_of,
    saving,
    with_images,
    write_table,
)
from tp_runner.errors import ItemError

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
    if form not in FORMATS:
        meant = did_you_mean(form, FORMATS)
        msg = f"--format must be one of {', '.join(FORMATS)}, got {form!r}{meant}"
        raise ConfigError(msg)
    if retry_delay_s is not None and not max_retries:
        msg = "--retry-delay-s is about items that are tried again; give --max-retries too"
        raise ConfigError(msg)
    is_stdout = str(output) == "-"
    if as_json and is_stdout:
        msg = "--json prints its document where --output - has the results; name a file for these"
        raise ConfigError(msg)
    if timeline is not None and (timeline.is_dir() or not timeline.absolute().parent.is_dir()):
        msg = f"--timeline must be a file in a folder that is there, got {str(timeline)!r}"
        raise ConfigError(msg)
    folder = output if is_folder(output) else None
    if folder is not None and form not in {"images", "files"}:
        msg = f"--output {output} is a folder, which takes one picture for each file: give --format images"
        raise ConfigError(msg)
    with contextlib.redirect_stdout(sys.stderr):
        kind = _load(runner)
    if form == "images" or folder is not None:
        kind = _image_runner(kind, reads=form == "images", folder=folder, batched=batch is not None)
    file = journal_of(output)
    sources = find([*inputs, *(more or [])], form, outputs=[output, file])
    if output.suffix == ".parquet":
        import_extra("pyarrow.parquet")
    if folder is not None:
        import_extra("PIL.Image")
    records: collections.deque[Record] = collections.deque()  # those on their way, oldest first
    with owned(file):
        with (
            Journal(file) as journal,
            _reserve_stdout() if as_json or is_stdout else contextlib.nullcontext(),
            _report_failure(journal, records, output),
        ):
            taken: dict[Path, str] = {}
            if folder is not None:  # those that are known now, before any work
                done = [row["source"] for row in rows_of(file)]
                for source in (*done, *(str(path) for path, _ in sources if path)):
                    if source != "-":
                        require_apart(source, folder, taken)

            def items() -> Any:
                for record in read(sources):
                    if not journal.has(record):
                        if folder is not None:  # and those that standard input names
                            require_apart(record.item, folder, taken)
                        records.append(record)
                        yield record.item

            with kind(
                _devices(devices),
                batch=batch,
                max_retries=max_retries,
                retry_delay_s=retry_delay_s,
                max_restarts=max_restarts,
                on_error="return" if keep_going else "raise",
                timeout_s=timeout_s,
                progress="auto" if progress else False,
                timeline=True,
            ) as running:
                for result in running.stream(items()):
                    journal.write(records.popleft(), result, keep_going=keep_going)
                if timeline is not None:
                    running.write_timeline(timeline)
                if progress and journal.n_now:
                    typer.echo(f"{running.stats()}\n{running.draw_timeline()}", err=True)
        with saving(output):
            write_table(file, output)
    if as_json:
        typer.echo(json.dumps({"output": str(output), **journal.counts()}, indent=2))
    else:
        _report(journal, output)
    if journal.n_failed:
        raise typer.Exit(1)


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
    """Report the progress of a run that an error ends, and the line of the failed item.

    Raises:
        TpError: An item failed. No other type: the command line takes some for a misuse of the command.
    """
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
    """Return the runner class called ``module:name``, or make one of a function.

    Raises:
        ConfigError: The module or its member does not exist, or is neither a class nor a function.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute:
        msg = f"the runner must be given as module:Runner, got {name!r}"
        raise ConfigError(msg)
    file = Path(module_name)
    if file.suffix == ".py" and not file.is_file():
        msg = f"no runner {name!r}: there is no file {module_name!r}{file_meant(file)}"
        raise ConfigError(msg)
    # The workers import it, too: a file by its module name, from its folder.
    here = str(file.parent.resolve() if file.suffix == ".py" else Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    try:
        module = importlib.import_module(file.stem if file.suffix == ".py" else module_name)
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
