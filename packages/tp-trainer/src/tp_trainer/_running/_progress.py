"""The progress of a run: a bar on a terminal or in a notebook, plain lines elsewhere."""

import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from tp_core.launching import ON_TERMINAL
from tp_core.output import (
    NotebookOutput,
    StandardStream,
    error_console,
    in_notebook,
    print_to_stderr,
    shows_progress,
)
from tp_core.output import Progress as Shown

Show = Callable[[int, str], None]

_BAR_INTERVAL_S = 0.1
_BAR_WIDTH = 20
_NOTEBOOK_INTERVAL_S = 0.5
_LINE_INTERVAL_S = 30.0
_MOST_NUMBERS = 2  # of a validation, in a bar of one line


class Reporter:
    """Shows the progress of epochs, and lines about the run."""

    def __init__(self, *, progress: Shown) -> None:
        self._has_lines = shows_progress(progress)
        is_terminal = StandardStream("stderr").isatty()
        self._on_terminal = self._has_lines and is_terminal
        # The launcher is on a terminal, and shows there what its ranks write into files.
        self._on_launchers = ON_TERMINAL in os.environ and not is_terminal
        self._notebook = NotebookOutput() if in_notebook() else None

    @contextmanager
    def epoch(self, label: str, steps: int, *, first: int = 0) -> "Iterator[Ticker]":
        """Show an epoch of ``steps`` steps for the length of a ``with`` block."""
        if self._notebook is not None:
            move = self._notebook.bar(label, steps)
            yield Ticker(label, steps, _NOTEBOOK_INTERVAL_S, move, first=first)
            self._notebook.remove_bar()
            return
        if self._on_launchers:
            show_state = partial(_write_state, label, steps)
            yield Ticker(label, steps, _BAR_INTERVAL_S, show_state, first=first)
            return
        if not self._on_terminal:
            if self._has_lines:
                interval_s = _LINE_INTERVAL_S
            else:
                interval_s = math.inf
            yield Ticker(label, steps, interval_s, first=first)
            return
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )
        from rich.table import Column

        columns = (
            TextColumn("{task.description}"),
            BarColumn(_BAR_WIDTH),
            MofNCompleteColumn(),
            TextColumn("{task.fields[words]}", table_column=Column(no_wrap=True)),
            TimeRemainingColumn(),
        )
        with Progress(*columns, console=error_console(), transient=True) as bar:
            task = bar.add_task(label, total=steps, completed=first, words="")

            def show(done: int, words: str) -> None:
                bar.update(task, completed=done, words=words)

            yield Ticker(label, steps, _BAR_INTERVAL_S, show, first=first)

    def say(self, line: str) -> None:
        if self._notebook is not None:
            self._notebook.add(line)
        else:
            print_to_stderr(line)


def _write_state(label: str, steps: int, done: int, words: str) -> None:
    """Write the state of a bar, which the carriage return at its end lets the next one replace."""
    full = _BAR_WIDTH * done // steps
    bar = "━" * full + " " * (_BAR_WIDTH - full)
    stream = StandardStream("stderr")
    stream.write(f"{label} {bar} {done}/{steps} {words}\r")
    stream.flush()


class Ticker:
    """Shows the steps done, at most once per interval.

    Attributes:
        next_update: The time of the next :meth:`update`, by `time.monotonic`.
    """

    def __init__(
        self, label: str, steps: int, interval_s: float, show: Show | None = None, *, first: int = 0
    ) -> None:
        self._label = label
        self._steps, self._first = steps, first
        self._interval_s = interval_s
        self._show = show
        self._began = time.monotonic()
        self.next_update = self._began + interval_s

    def update(
        self,
        done: int,
        loss: float | None,
        data: Mapping[str, float] | None = None,
        *,
        val: Mapping[str, float] | None = None,
        samples_per_s: float = 0.0,
    ) -> None:
        """Show that ``done`` steps are done, and set the time of the next update.

        A bar also shows the numbers of the last validation, and the samples per second.
        """
        now = time.monotonic()
        self.next_update = now + self._interval_s
        words = _worded(loss, data or {}, now - self._began)
        if self._show is not None:
            for name, value in [*(val or {}).items()][:_MOST_NUMBERS]:
                words += f"  {name}={value:.4g}"
            if samples_per_s:
                words += f"  {samples_per_s:,.0f} samples/s"
            self._show(done, words.strip())
        else:
            per_step = (now - self._began) / max(done - self._first, 1)
            if per_step < 1:
                speed = f"{1 / per_step:,.1f} steps/s"
            else:
                speed = f"{per_step:,.1f} s per step"
            line = f"{self._label}  step {done}/{self._steps}{words}  {speed}"
            print_to_stderr(line)


def _worded(loss: float | None, data: Mapping[str, float], seconds: float) -> str:
    """Return the text for a loss and what a loader measured; empty before the first one."""
    words = "" if loss is None else f"  loss={loss:.4g}"
    if data.get("padded_tokens"):
        words += f"  fill={data['tokens'] / data['padded_tokens']:.3g}"
    if "wait_s" in data and seconds:
        words += f"  wait={data['wait_s'] / seconds:.0%}"
    return words
