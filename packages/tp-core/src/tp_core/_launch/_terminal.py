"""Whether somebody watches: what ``progress=`` means in all packages."""

import sys
from typing import Literal

from tp_core.errors import ConfigError

__all__ = ["Progress", "in_notebook", "shows_progress"]

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
