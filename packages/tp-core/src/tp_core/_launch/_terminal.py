"""Whether somebody watches: what ``progress=`` means in all packages, and how wide tables are."""

import sys
from typing import TYPE_CHECKING, Literal

from tp_core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Progress", "in_notebook", "output_console", "shows_progress"]

Progress = bool | Literal["auto"]
"""Whether progress is shown: with "auto" where standard error is a terminal, with ``True`` in files, too."""


def shows_progress(progress: Progress) -> bool:
    """Return whether to show how far something is.

    Raises:
        ConfigError: ``progress`` is neither a bool nor "auto".
    """
    if isinstance(progress, bool):
        return progress
    if progress != "auto":
        msg = f"progress must be True, False or 'auto' (a bar on a terminal), got {progress!r}"
        raise ConfigError(msg)
    return sys.stderr is not None and sys.stderr.isatty()


def in_notebook() -> bool:
    """Return whether this program runs in a notebook, whose outputs can be replaced."""
    ipython = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return hasattr(shell, "kernel")


def output_console() -> "Console":
    """Return what prints tables on stdout; in a pipe, lines are not cut to a terminal's width."""
    from rich.console import Console

    return Console() if sys.stdout.isatty() else Console(width=10_000)
