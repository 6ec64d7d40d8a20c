"""The progress of a rank on the terminal of its launcher, which shows what the rank writes into a file."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from tp_core.launching import ON_TERMINAL
from tp_core.output import Progress

from tp_trainer._running._progress import BAR_INTERVAL_S, BAR_WIDTH, Reporter, Ticker


def make_reporter(progress: Progress) -> Reporter:
    """Return what shows the progress of a run here."""
    if ON_TERMINAL in os.environ and sys.stderr is not None and not sys.stderr.isatty():
        return LauncherReporter(progress=progress)
    return Reporter(progress=progress)


class LauncherReporter(Reporter):
    """Shows the progress of epochs by states that end with a carriage return."""

    @contextmanager
    def epoch(self, label: str, steps: int, *, first: int = 0) -> Iterator[Ticker]:
        """Show an epoch of ``steps`` steps for the length of a ``with`` block."""
        yield Ticker(label, steps, BAR_INTERVAL_S, partial(_write_state, label, steps), first=first)


def _write_state(label: str, steps: int, done: int, words: str) -> None:
    full = BAR_WIDTH * done // steps
    bar = "━" * full + " " * (BAR_WIDTH - full)
    sys.stderr.write(f"{label} {bar} {done}/{steps} {words}\r")
    sys.stderr.flush()
