"""What a plugin of others does to the process while it is loaded or asked is kept from everybody else."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from types import FrameType
from typing import Any, TypeVar

from tp_core.plugins._conflicts import DISABLE_VARIABLE, FIRST_PARTY
from tp_core.plugins._contribution import PluginInfo
from tp_core.plugins._settings import read_settings, restore_settings

__all__ = ["ProgramStopError", "call", "keep_settings", "quiet"]

T = TypeVar("T")

PATIENCE_S = 10.0
"""After so many seconds a plugin that is still being loaded or asked is named on stderr."""


class ProgramStopError(Exception):
    """What a signal handler of the program raised while a plugin ran, Ctrl-C, say: no fault of the plugin's.

    Attributes:
        error: What it raised.
    """

    def __init__(self, error: BaseException) -> None:
        super().__init__(repr(error))
        self.error = error


def call(info: PluginInfo, doing: str, function: Callable[[], T]) -> tuple[T, tuple[str, ...]]:
    """Call a function of a plugin: it writes to stderr, and settings that it changes are put back.

    One that does not come to an end is named on stderr after a while. Those of this project are taken at
    their word.

    Args:
        info: The plugin.
        doing: What is done with it: "loaded", "asked".
        function: What to call.

    Returns:
        What the function returned, and the words for the settings that it changed.

    Raises:
        ProgramStopError: A signal handler of the program raised meanwhile.
        BaseException: What the function raised.
    """
    if info.distribution in FIRST_PARTY:
        try:
            with redirect_stdout(sys.stderr):  # stdout may be read by machines
                return function(), ()
        except KeyboardInterrupt as error:
            raise ProgramStopError(error) from error
    changed: list[str] = []
    raised: list[BaseException] = []
    timer = threading.Timer(PATIENCE_S, _tell, (info, doing))
    timer.daemon = True
    timer.start()
    try:
        with quiet(), keep_settings(changed), _signals_noted(raised):
            result = function()
    except BaseException as error:
        if raised:
            raise ProgramStopError(raised[0]) from error
        raise
    finally:
        timer.cancel()
    return result, tuple(changed)


def _tell(info: PluginInfo, doing: str) -> None:
    print(
        f"tp: plugin {info} has been {doing} for {PATIENCE_S:g} s; {DISABLE_VARIABLE}={info.name} leaves "
        "it out",
        file=sys.stderr,
        flush=True,
    )


@contextmanager
def keep_settings(changed: list[str]) -> Iterator[None]:
    """Put back what is changed of the process's settings, and add the words for it to a list."""
    before = read_settings()
    try:
        yield
    finally:
        changed += restore_settings(before)


# -- stdout ---------------------------------------------------------------------------------------

_lock = threading.Lock()
_descriptors: list[int] = []  # copies of stdout's, one for each that is inside; the first one is real


@contextmanager
def quiet() -> Iterator[None]:
    """Let what is written to stdout go to stderr, by whatever: stdout may be read by machines.

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
        # Threads may leave in another order than they came.
        last = _descriptors.pop() if len(_descriptors) > 1 else None
        if last is None:
            last = _descriptors.pop()
            os.dup2(last, 1)
        os.close(last)


def _flush() -> None:
    """Write what Python and the C library keep for the descriptor."""
    with suppress(OSError, ValueError):
        if sys.__stdout__ is not None:
            sys.__stdout__.flush()
    with suppress(OSError, TypeError, AttributeError, ImportError):
        import ctypes

        ctypes.CDLL(None).fflush(None)


# -- signals --------------------------------------------------------------------------------------


@contextmanager
def _signals_noted(raised: list[BaseException]) -> Iterator[None]:
    """Note what the program's own signal handlers raise: that is no fault of the plugin's.

    They run on the main thread alone.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def noting(handler: Callable[[int, FrameType | None], Any]) -> Callable[[int, FrameType | None], Any]:
        def note(number: int, frame: FrameType | None) -> Any:
            try:
                return handler(number, frame)
            except BaseException as error:
                raised.append(error)
                raise

        return note

    kept = {}
    for number in (signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGALRM", signal.SIGINT)):
        handler = signal.getsignal(number)
        if callable(handler):
            kept[number] = (handler, noting(handler))
    for number, (_, wrapper) in kept.items():
        signal.signal(number, wrapper)
    try:
        yield
    finally:
        for number, (handler, wrapper) in kept.items():
            if signal.getsignal(number) is wrapper:  # another one is put back as a setting
                signal.signal(number, handler)
