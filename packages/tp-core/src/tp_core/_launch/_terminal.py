"""Whether somebody watches: what ``progress=`` means in all packages, and how wide tables are."""

import os
import sys
from typing import TYPE_CHECKING, Literal

from tp_core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Progress", "in_notebook", "output_console", "shows_progress"]

Progress = bool | Literal["auto"]
"""Whether progress is shown: with "auto" on a terminal or in a notebook, with ``True`` in files, too."""


def shows_progress(progress: Progress) -> bool:
    """Return whether to show how far something is.

    Raises:
        ConfigError: ``progress`` is neither a bool nor "auto".
    """
    if isinstance(progress, bool):
        return progress
    if progress != "auto":
        msg = f"progress must be True, False or 'auto' (on a terminal or in a notebook), got {progress!r}"
        raise ConfigError(msg)
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def in_notebook() -> bool:
    """Return whether this is a notebook's process, whose outputs can be replaced, and not a fork of it."""
    ipython = sys.modules.get("IPython")
    kernel = getattr(None if ipython is None else ipython.get_ipython(), "kernel", None)
    return kernel is not None and bool(kernel.session.pid == os.getpid())


def output_console() -> "Console":
    """Return what prints tables on stdout; in a pipe, lines are not cut to a terminal's width."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=10_000)
