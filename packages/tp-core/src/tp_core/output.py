"""The output of a run: a terminal, a notebook, or a file."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal

from tp_core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["NotebookOutput", "Progress", "in_notebook", "output_console", "shows_progress"]


# -- Progress -------------------------------------------------------------------------------------


Progress = bool | Literal["auto"]
"""The option to show progress: "auto" on a terminal or in a notebook only, ``True`` in files, too."""


def shows_progress(progress: Progress) -> bool:
    """Return whether a run shows its progress here: "auto" says yes on a terminal and in a notebook."""
    if isinstance(progress, bool):
        return progress
    if progress != "auto":
        msg = f"progress must be True, False or 'auto' (on a terminal or in a notebook), got {progress!r}"
        raise ConfigError(msg)
    return in_notebook() or (sys.stderr is not None and sys.stderr.isatty())


def in_notebook() -> bool:
    """Return whether this is a notebook's process and not a fork of it: a fork cannot update outputs."""
    ipython = sys.modules.get("IPython")
    kernel = getattr(None if ipython is None else ipython.get_ipython(), "kernel", None)
    return kernel is not None and bool(kernel.session.pid == os.getpid())


def output_console() -> "Console":
    """Return a console that prints tables on stdout; in a pipe of any width, or of ``COLUMNS``."""
    from rich.console import Console

    columns = os.environ.get("COLUMNS", "")
    asked = int(columns) if columns.isdecimal() and int(columns) else 10_000
    return Console() if sys.stdout.isatty() else Console(width=asked)


_MOST_LINES = 200  # each update sends all of them


class NotebookOutput:
    """One output of a notebook's cell with lines and a bar, updated in place, as HTML and plain text.

    It appears with the first line or the first move of the bar, in the cell that runs then.
    """

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._bar = ""
        self._handle: Any = None

    def add(self, line: str) -> None:
        """Show one more line; the oldest of many go."""
        self._lines = [*self._lines, line][-_MOST_LINES:]
        self._show()

    def replace(self, lines: Sequence[str]) -> None:
        """Show these lines in the place of all."""
        self._lines = list(lines)
        self._show()

    def bar(self, label: str, steps: int | None) -> Callable[[int, str], None]:
        """Return a function that shows the number of steps done and a few words."""
        from html import escape  # here: only notebooks need it, and starts of workers must not wait for it

        def move(done: int, words: str) -> None:
            bar, of = ("", "") if steps is None else (f"max='{steps}' value='{done}'", f"/{steps}")
            words = escape(f"{done}{of} {words}")
            self._bar = f"<div>{escape(label)} <progress {bar}></progress> {words}</div>"
            self._show()

        return move

    def remove_bar(self) -> None:
        """Show no bar any more."""
        self._bar = ""

    def _show(self) -> None:
        from html import escape

        from IPython.display import display  # every notebook has it

        text = "\n".join(self._lines)
        shown = {"text/plain": text, "text/html": f"<pre>{escape(text)}</pre>{self._bar}"}
        if self._handle is None:
            self._handle = display(shown, raw=True, display_id=True)
        else:
            self._handle.update(shown, raw=True)
