"""Progress of a stream on a terminal or in a notebook: items, rate, time left, how busy the workers are."""

import contextlib
import io
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from tp_core.output import NotebookOutput, error_console, in_notebook

if TYPE_CHECKING:
    from tp_runner._scheduling._pool import RunnerPool
    from tp_runner._stats import StageStats


PERIOD_S = 0.1
NOTEBOOK_PERIOD_S = 0.5

Show = Callable[[int, str, str], None]
"""Shows how many items are done, at which rate, and how busy the workers are."""


def with_progress(
    chunks: Iterator[list[Any]], total: int | None, pool: "RunnerPool"
) -> Generator[list[Any], None, None]:
    """Yield lists of results, showing how many they have held so far."""
    began = time.monotonic()
    before = pool.stats()
    n_items, shown_at = 0, began
    period_s = NOTEBOOK_PERIOD_S if in_notebook() else PERIOD_S
    if in_notebook():
        bar = _notebook_bar(total)
    else:
        bar = _terminal_bar(total)
    with bar as show:

        def show_now() -> None:
            elapsed = max(time.monotonic() - began, 1e-9)
            working = [
                now.working_s - then.working_s
                for now, then in zip(pool.stats().workers, before.workers, strict=True)
            ]
            busy = " ".join(f"{min(seconds / elapsed, 1.0):.0%}" for seconds in working)
            show(n_items, f"{n_items / elapsed:.1f}/s", f"busy {busy}")

        try:
            for results in chunks:
                n_items += len(results)
                yield results
                if time.monotonic() - shown_at > period_s:
                    show_now()
                    shown_at = time.monotonic()
        finally:
            show_now()
            if isinstance(chunks, Generator):
                chunks.close()


@contextlib.contextmanager
def _terminal_bar(total: int | None) -> Iterator[Show]:
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[workers]}"),
    )
    with Progress(*columns, console=error_console()) as progress:
        task = progress.add_task("", total=total, rate="", workers="")
        n_shown = 0

        def show(n_items: int, rate: str, workers: str) -> None:
            nonlocal n_shown
            n_shown = n_items
            progress.update(task, completed=n_items, rate=rate, workers=workers)

        yield show
        if total is None:
            progress.update(task, total=n_shown)


@contextlib.contextmanager
def _notebook_bar(total: int | None) -> Iterator[Show]:
    """Show a bar while it moves, and after its end, also by an error, a line in its place."""
    output = NotebookOutput()
    move = output.bar("", total)
    words = ""

    def show(n_items: int, rate: str, workers: str) -> None:
        nonlocal words
        move(n_items, f"{rate}, {workers}")
        words = f"{n_items} items, {rate}, {workers}"

    try:
        yield show
    finally:
        output.remove_bar()
        output.add(words)


def with_table(
    chunks: Iterator[list[Any]], stages: "Sequence[StageStats]"
) -> Generator[list[Any], None, None]:
    """Yield lists of results, showing the statistics of each stage of a pipeline."""
    began = time.monotonic()

    def table() -> Table:
        seconds = max(time.monotonic() - began, 1e-9)
        shown = Table("stage", "workers", "taken", "given", "rate")
        for stage in stages:
            workers = f"{len(stage.devices)} {stage.devices[0]}"
            if stage.is_shared:
                workers += ", shared"
            rate = f"{stage.given / seconds:.1f}/s"
            shown.add_row(stage.name, workers, str(stage.taken), str(stage.given), rate)
        return shown

    if in_notebook():
        yield from _with_notebook_table(chunks, table)
        return
    with Live(get_renderable=table, console=error_console()):
        yield from chunks


def _with_notebook_table(
    chunks: Iterator[list[Any]], table: Callable[[], Table]
) -> Generator[list[Any], None, None]:
    output = NotebookOutput()
    shown_at = time.monotonic()

    def show() -> None:
        console = Console(file=io.StringIO(), force_jupyter=False, width=100)
        with console.capture() as text:
            console.print(table())
        output.replace([line.rstrip() for line in text.get().splitlines()])

    try:
        for results in chunks:
            yield results
            if time.monotonic() - shown_at > NOTEBOOK_PERIOD_S:
                show()
                shown_at = time.monotonic()
    finally:
        show()
        if isinstance(chunks, Generator):
            chunks.close()
