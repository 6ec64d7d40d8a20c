"""Calling plugins of others: what they print stays out of stdout, and one that does not answer is named."""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from typing import TypeVar

from tp_core.plugins._hooks import DISABLE_VARIABLE, FIRST_PARTY, PluginInfo

T = TypeVar("T")

PATIENCE_S = 10.0
"""After so many seconds a plugin that is still being loaded or asked is named on stderr."""


def call(info: PluginInfo, doing: str, function: Callable[[], T]) -> T:
    """Call a function of a plugin, whose output goes to stderr.

    One that takes long is named on stderr, with what leaves it out.

    Args:
        info: The plugin.
        doing: What is done with it: "loaded", "asked".
        function: What to call.

    Raises:
        BaseException: What the function raised.
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


# Threads may be inside at once, as the descriptor is the process's: the first one in redirects it, the
# last one out puts it back. One copy of stdout's descriptor for each; the first copy is the real stdout.
_lock = threading.Lock()
_descriptors: list[int] = []


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Let what is written to stdout go to stderr: machines may read stdout, as with ``--json``.

    Python's own stream, and the descriptor that C libraries and child processes write to.
    """
    with redirect_stdout(sys.stderr):
        is_redirected = _redirect()
        try:
            yield
        finally:
            if is_redirected:
                _restore()


def _redirect() -> bool:
    if sys.__stdout__ is None:  # it was closed, and its number may be a file's
        return False
    with _lock:
        try:
            _flush()
            _descriptors.append(os.dup(1))
        except OSError:
            return False
        try:
            os.dup2(2, 1)
        except OSError:
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
    """Write what Python and the C library have buffered, before the descriptor points elsewhere."""
    with suppress(OSError, ValueError):
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
    with suppress(OSError, TypeError, AttributeError, ImportError):
        import ctypes

        ctypes.CDLL(None).fflush(None)
