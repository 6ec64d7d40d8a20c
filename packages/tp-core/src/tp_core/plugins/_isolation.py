"""Calls of plugins: their output goes to stderr, and a slow one is reported."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO, TypeVar

from tp_core.plugins._hooks import DISABLE_VARIABLE, FIRST_PARTY, PluginInfo

T = TypeVar("T")

PATIENCE_S = 10.0
"""Seconds after which a plugin that is still being loaded or asked is reported on stderr."""


def call(info: PluginInfo, doing: str, function: Callable[[], T]) -> T:
    """Call a function of a plugin, with its output sent to stderr.

    A slow one is reported on stderr, with the variable that leaves the plugin out.

    Args:
        info: The plugin.
        doing: The participle for the message: "loaded", "asked".
        function: The function.

    Raises:
        BaseException: The function's own error.
    """
    if info.distribution in FIRST_PARTY:  # those of this project print nothing
        return function()
    timer = threading.Timer(PATIENCE_S, _warn_slow, (info, doing))
    timer.daemon = True  # a plugin that never returns must not keep the program from ending
    timer.start()
    try:
        with stdout_to_stderr():
            return function()
    finally:
        timer.cancel()


def _warn_slow(info: PluginInfo, doing: str) -> None:
    print(
        f"tp: plugin {info} has been {doing} for {PATIENCE_S:g} s; {DISABLE_VARIABLE}={info.name} leaves "
        "it out",
        file=sys.stderr,
        flush=True,
    )


# Both the stream and the descriptor are the process's, and several threads may redirect them at once: the
# first one in redirects, the last one out restores. Without the lock and the count, a thread that leaves
# early would send another one's output to stdout, and one that leaves late would keep stdout redirected.
_lock = threading.Lock()
_inside = 0  # threads in the block
_stream: TextIO | None = None  # the real sys.stdout, while redirected
_descriptor: int | None = None  # a copy of descriptor 1, while redirected


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr in a block: other programs may parse stdout, as with ``--json``.

    It redirects Python's stream, and the descriptor that C libraries and child processes write to.
    """
    global _inside  # noqa: PLW0603 - stdout is the process's
    with _lock:
        if not _inside:
            _redirect()
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if not _inside:
                _restore()


def _redirect() -> None:
    global _stream, _descriptor  # noqa: PLW0603 - as above
    _stream, sys.stdout = sys.stdout, sys.stderr
    if sys.__stdout__ is None:  # it was closed, and its number may be a file's
        return
    with suppress(OSError):  # descriptor 1 is closed, or there is none left: the stream alone
        _flush()
        _descriptor = os.dup(1)
        try:
            os.dup2(2, 1)
        except OSError:
            os.close(_descriptor)
            _descriptor = None


def _restore() -> None:
    global _stream, _descriptor  # noqa: PLW0603 - as above
    if _descriptor is not None:
        _flush()
        os.dup2(_descriptor, 1)
        os.close(_descriptor)
        _descriptor = None
    if _stream is not None:
        sys.stdout, _stream = _stream, None


def _flush() -> None:
    """Flush the buffers of Python and the C library, before the descriptor points elsewhere."""
    with suppress(OSError, ValueError):
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
    with suppress(OSError, TypeError, AttributeError, ImportError):
        import ctypes

        ctypes.CDLL(None).fflush(None)
