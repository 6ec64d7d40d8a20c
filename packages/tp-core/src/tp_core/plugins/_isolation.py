"""Calls of plugins: their output goes to stderr, and a slow one is reported."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TypeVar

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
    if info.distribution in FIRST_PARTY:
        with redirect_stdout(sys.stderr):
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


# The descriptor belongs to the process, and several threads may redirect it at once: the first one in
# redirects it, the last one out restores it. Without the lock and the count, a thread that leaves early
# would send another one's output to stdout. Each thread keeps a copy of descriptor 1; the first copy is
# the real stdout.
_lock = threading.Lock()
_descriptors: list[int] = []


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Redirect stdout to stderr in a block: other programs may parse stdout, as with ``--json``.

    It redirects Python's stream, and the descriptor that C libraries and child processes write to.
    """
    with redirect_stdout(sys.stderr):
        is_redirected = _redirect()
        try:
            yield
        finally:
            if is_redirected:
                _restore()


def _redirect() -> bool:
    if sys.__stdout__ is None:  # it was closed, and descriptor 1 may be an unrelated file
        return False
    with _lock:
        try:
            _flush()
            _descriptors.append(os.dup(1))
        except OSError:
            return False
        try:
            os.dup2(2, 1)
        except OSError:  # stderr is closed: there is nowhere to redirect to
            os.close(_descriptors.pop())
            return False
        return True


def _restore() -> None:
    with _lock:
        _flush()
        is_last = len(_descriptors) == 1
        copy = _descriptors.pop()
        if is_last:
            os.dup2(copy, 1)
        os.close(copy)


def _flush() -> None:
    """Flush the buffers of Python and the C library, before the descriptor points elsewhere."""
    with suppress(OSError, ValueError):
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
    with suppress(OSError, TypeError, AttributeError, ImportError):
        import ctypes

        ctypes.CDLL(None).fflush(None)
