"""The output of a run: a terminal, a notebook, a file, or whatever stands in the place of the streams."""

import contextlib
import io
import logging
import os
import sys
from collections.abc import Callable, Sequence
from typing import IO, TYPE_CHECKING, Any, Literal, cast

from tp_core.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "NotebookOutput",
    "Progress",
    "StandardStream",
    "error_console",
    "flush_streams",
    "get_logger",
    "in_notebook",
    "output_console",
    "print_to_stderr",
    "shows_progress",
]


# -- Streams --------------------------------------------------------------------------------------


class StandardStream:
    """Standard output or error as a program has it; no call raises.

    ``sys.stdout`` and ``sys.stderr`` may be ``None`` (in a daemon), closed, or a pipe that nobody reads any
    more. A program may also put its own object there, with ``write`` and ``flush`` alone, say to give each
    line to a logger. What such a stream cannot do is left undone.

    Args:
        name: ``"stdout"`` or ``"stderr"``: the stream of this moment.

    Example:
        >>> StandardStream("stdout").isatty()
        False
    """

    encoding = "utf-8"  # rich asks for it

    def __init__(self, name: Literal["stdout", "stderr"]) -> None:
        self._stream: Any = getattr(sys, name, None)
        self.encoding = getattr(self._stream, "encoding", None) or self.encoding

    def write(self, text: str) -> int:
        """Write ``text``."""
        with contextlib.suppress(Exception):  # a program's object may raise anything
            self._stream.write(text)
        return len(text)

    def flush(self) -> None:
        """Write what is buffered."""
        with contextlib.suppress(Exception):  # as above
            self._stream.flush()

    def isatty(self) -> bool:
        """Return whether it is a terminal."""
        with contextlib.suppress(Exception):  # as above
            return bool(self._stream.isatty())
        return False

    def columns(self) -> int:
        """Return how many characters a line of its terminal has; 80 if it does not say."""
        with contextlib.suppress(Exception):  # as above
            return os.get_terminal_size(self._stream.fileno()).columns
        return 80


def flush_streams() -> None:
    """Flush standard output and standard error."""
    StandardStream("stdout").flush()
    StandardStream("stderr").flush()


def print_to_stderr(line: str) -> None:
    """Print a line on standard error."""
    stream = StandardStream("stderr")
    stream.write(f"{line}\n")
    stream.flush()


class _LastResort(logging.Handler):
    """Prints warnings on standard error where a program has set up no logging.

    As Python's own last resort, which raises in the call that logs if the stream is closed or has no
    ``write``.
    """

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__(logging.WARNING)
        self._logger = logger

    def emit(self, record: logging.LogRecord) -> None:
        """Print ``record``, if no handler of the program gets it."""
        logger: logging.Logger | None = self._logger
        while logger is not None:
            if any(handler is not self for handler in logger.handlers):
                return
            logger = logger.parent if logger.propagate else None
        print_to_stderr(self.format(record))


def get_logger(package: str) -> logging.Logger:
    """Return the logger of a package, whose warnings break nothing, whatever standard error is.

    Example:
        >>> get_logger("tp_core").name
        'tp_core'
    """
    logger = logging.getLogger(package)
    if not any(isinstance(handler, _LastResort) for handler in logger.handlers):
        logger.addHandler(_LastResort(logger))
    return logger


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
    return in_notebook() or StandardStream("stderr").isatty()


def in_notebook() -> bool:
    """Return whether this is a notebook's process and not a fork of it: a fork cannot update outputs."""
    ipython = sys.modules.get("IPython")
    if ipython is None:
        return False
    kernel = getattr(ipython.get_ipython(), "kernel", None)
    return kernel is not None and bool(kernel.session.pid == os.getpid())


def output_console() -> "Console":
    """Return a console that prints tables on stdout; in a pipe of any width, or of ``COLUMNS``."""
    from rich.console import Console

    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        width = int(columns)
    else:
        width = 10_000
    stream = StandardStream("stdout")
    if stream.isatty():
        return Console()
    if isinstance(sys.stdout, io.TextIOBase) and not sys.stdout.closed:
        return Console(width=width)  # a report that finds a full disk is not to end as if it had been written
    # rich writes and flushes whatever the stream is, and raises what that raises.
    return Console(file=cast("IO[str]", stream), width=width)


def error_console() -> "Console":
    """Return a console that prints on standard error."""
    from rich.console import Console

    stream = StandardStream("stderr")
    if stream.isatty():
        return Console(stderr=True)
    return Console(file=cast("IO[str]", stream))  # as above


_MOST_LINES = 200  # each update sends all of them


class NotebookOutput:
    """One output of a notebook's cell with lines and a bar, updated in place, as HTML and plain text.

    It appears with the first line or the first move of the bar, in the cell that runs then. No call raises:
    while a program has streams that cannot be flushed, as ``sys.stdout = None``, it stays as it was.
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
        # ipykernel flushes both streams first, and raises what they raise: the output is left as it was.
        with contextlib.suppress(Exception):
            if self._handle is None:
                self._handle = display(shown, raw=True, display_id=True)
            else:
                self._handle.update(shown, raw=True)
