"""A progress bar: items, rate, time left, how busy the workers are."""

import time
from collections.abc import Generator, Iterator, Sequence
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

if TYPE_CHECKING:
    from tp_runner._scheduling._pool import RunnerPool
    from tp_runner._stats import StageStats

__all__ = ["with_progress", "with_table"]

PERIOD_S = 0.1


def with_progress(
    chunks: Iterator[list[Any]], total: int | None, pool: "RunnerPool"
) -> Generator[list[Any], None, None]:
    """Yield lists of results, showing how many they have held so far."""
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[workers]}"),
    )
    began = time.monotonic()
    before = pool.stats()
    n_items, shown_at = 0, began
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, rate="", workers="")

        def show() -> None:
            elapsed = max(time.monotonic() - began, 1e-9)
            working = [
                now.working_s - then.working_s
                for now, then in zip(pool.stats().workers, before.workers, strict=True)
            ]
            busy = " ".join(f"{min(seconds / elapsed, 1.0):.0%}" for seconds in working)
            progress.update(
                task, completed=n_items, rate=f"{n_items / elapsed:.1f}/s", workers=f"busy {busy}"
            )

        try:
            for results in chunks:
                n_items += len(results)
                yield results
                if time.monotonic() - shown_at > PERIOD_S:
                    show()
                    shown_at = time.monotonic()
            if total is None:
                progress.update(task, total=n_items)
        finally:
            show()
            if isinstance(chunks, Generator):
                chunks.close()


def with_table(
    chunks: Iterator[list[Any]], stages: "Sequence[StageStats]"
) -> Generator[list[Any], None, None]:
    """Yield lists of results, showing what has gone through each stage of a pipeline so far."""
    began = time.monotonic()

    def table() -> Table:
        seconds = max(time.monotonic() - began, 1e-9)
        shown = Table("stage", "workers", "taken", "given", "rate")
        for stage in stages:
            workers = f"{len(stage.devices)} {stage.devices[0]}{', shared' if stage.is_shared else ''}"
            rate = f"{stage.given / seconds:.1f}/s"
            shown.add_row(stage.name, workers, str(stage.taken), str(stage.given), rate)
        return shown

    with Live(get_renderable=table, console=Console(stderr=True)):
        yield from chunks
