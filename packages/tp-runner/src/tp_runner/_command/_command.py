"""The command ``tp run``: a batch of items through a runner, from files to a file, with resume."""

import importlib
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from tp_core.errors import ConfigError

from tp_runner._command._journal import Journal
from tp_runner._command._readers import FORMATS, Record, read
from tp_runner._runner import OrderedRunner, UnorderedRunner

__all__ = ["app"]

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)


@app.command()
def run(
    runner: Annotated[str, typer.Argument(help="module:Runner, or module:function.")],
    inputs: Annotated[
        list[str],
        typer.Option("--input", help="A file, a pattern, a directory, or - for standard input; repeatable."),
    ],
    output: Annotated[
        Path, typer.Option(help="Where results go, one JSON object on each line; - for standard output.")
    ],
    more: Annotated[
        list[str] | None, typer.Argument(help="More input files, as a shell expands a pattern.")
    ] = None,
    devices: Annotated[str, typer.Option(help="auto, a number of CPU workers, or cuda:0,cuda:1")] = "auto",
    form: Annotated[
        str, typer.Option("--format", help="jsonl, lines or files; auto goes by the name.")
    ] = "auto",
    batch: Annotated[int | None, typer.Option(help="Items that the runner gets at once.")] = None,
    max_retries: Annotated[int, typer.Option(help="How often a failed item is tried again.")] = 0,
    max_restarts: Annotated[int, typer.Option(help="How often dead workers are started again.")] = 10,
    timeout_s: Annotated[float | None, typer.Option(help="The most time for one item.")] = None,
    keep_going: Annotated[
        bool, typer.Option("--keep-going", help="Write errors in place of results and go on.")
    ] = False,
    progress: Annotated[bool, typer.Option(help="Show a progress bar.")] = True,
) -> None:
    """Run every item of the input through a runner.

    Each line of the output has the item's source and number and its result. Called again after an
    interruption, the command goes on where it was: no item is lost or done twice in the output, and
    items that failed are tried again. Its exit status is 1 if items failed.
    """
    if form not in FORMATS:
        msg = f"--format must be one of {', '.join(FORMATS)}, got {form!r}"
        raise ConfigError(msg)
    kind = _load(runner)
    paths = [*inputs, *(more or [])]
    with Journal(output) as journal:
        records: list[Record] = []  # those on their way, oldest first

        def items() -> Any:
            for record in read(paths, form, output=output):
                if not journal.has(record):
                    records.append(record)
                    yield record.item

        with kind(
            _devices(devices),
            batch=batch,
            max_retries=max_retries,
            max_restarts=max_restarts,
            on_error="return" if keep_going else "raise",
            timeout_s=timeout_s,
            progress=progress,
        ) as running:
            n_failed = 0
            for result in running.stream(items()):
                n_failed += journal.write(records.pop(0), result)
        again = f" ({journal.n_again} had failed before)" if journal.n_again else ""
        typer.echo(
            f"{journal.n_before} done before, {journal.n_now} now{again}, "
            f"{n_failed} of them failed: {output}",
            err=True,
        )
    if n_failed:
        raise typer.Exit(1)


def _load(name: str) -> type[OrderedRunner]:
    """Return the runner class called ``module:name``, or make one of a function.

    Raises:
        ConfigError: There is no such thing.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute:
        msg = f"the runner must be given as module:Runner, got {name!r}"
        raise ConfigError(msg)
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        found = getattr(importlib.import_module(module_name), attribute)
    except (ImportError, AttributeError) as error:
        msg = f"no runner {name!r}: {error}; it is looked for from {here}"
        raise ConfigError(msg) from error
    if isinstance(found, type) and issubclass(found, OrderedRunner | UnorderedRunner):
        # Results are written in the order of the items, which is what makes resuming simple.
        return found if issubclass(found, OrderedRunner) else type("Run", (found,), {"_ordered": True})
    if callable(found) and not isinstance(found, type):
        work = staticmethod(lambda device, cfg, item: found(item))  # noqa: ARG005 - the runner's protocol
        return type("Run", (OrderedRunner,), {"producer_work": work})
    msg = f"{name!r} is neither a runner class nor a function, but {found!r}"
    raise ConfigError(msg)


def _devices(text: str) -> Any:
    if text.isdigit():
        return int(text)
    return text.split(",") if "," in text else text
