"""The exit of a rank: its report to the launcher, output to a closed terminal, and an exit at a deadline."""

import ctypes
import errno
import json
import os
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tp_core.internal import atomic_part

EXIT_REPORT = "TP_RANK_END"
"""The environment variable with the path of a rank's report, set by the launcher."""


@dataclass(frozen=True, slots=True)
class ExitReport:
    """The exit of a rank after a signal that it handled, and the checkpoint to resume from."""

    signal: int
    saved: str | None


def write_exit_report(number: int, saved: Path | None) -> None:
    name = os.environ.get(EXIT_REPORT)
    if name is None:
        return
    values = {"signal": number, "saved": None if saved is None else str(saved.absolute())}
    with suppress(OSError), atomic_part(name) as part:  # not where the launcher and its folder are gone
        part.write_text(json.dumps(values))


def read_exit_report(path: Path) -> ExitReport | None:
    try:
        values = json.loads(path.read_text())
        return ExitReport(int(values["signal"]), values["saved"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def discard_closed_terminal() -> None:
    """Discard output to a closed terminal: a write would end the program with an error."""
    if sys.platform == "win32":
        return
    import termios

    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # hung up; descriptors of files and pipes have another error
                # Replaced, not closed: the next opened file would get the number, and with it the output.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)


_SIGEV_THREAD = 2  # from <signal.h>


class _SigEvent(ctypes.Structure):
    """``struct sigevent`` of 64-bit Linux, in glibc and musl alike."""

    _fields_ = (
        ("value", ctypes.c_ssize_t),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("padding", ctypes.c_char * 32),
    )


class _TimeSpec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class _TimerSpec(ctypes.Structure):
    _fields_ = (("interval", _TimeSpec), ("value", _TimeSpec))


class HardExit:
    """Ends the process at a deadline, whatever it is doing; a new deadline replaces the old one.

    At a kernel timer the C library calls ``_exit`` in a new thread. So this works even if native code holds
    the GIL and no Python thread runs.
    """

    def __init__(self, status: int) -> None:
        if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
            msg = "timers that end a process are known of 64-bit Linux alone"
            raise OSError(msg)
        self._libc = ctypes.CDLL(None)  # the C library of this process: glibc or musl
        leave = ctypes.cast(self._libc._exit, ctypes.c_void_p)
        event = _SigEvent(value=status, notify=_SIGEV_THREAD, function=leave)
        self._timer = ctypes.c_void_p()
        # Not the wall clock: setting it must not end a run.
        if self._libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            msg = "the kernel gives no timer"
            raise OSError(msg)

    def set(self, seconds: float) -> None:
        """End the process this many seconds from now."""
        whole = int(seconds)
        spec = _TimerSpec(value=_TimeSpec(whole, int((seconds - whole) * 1e9)))
        self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)

    def cancel(self) -> None:
        self.set(0.0)

    def __del__(self) -> None:
        timer = getattr(self, "_timer", None)
        if timer:
            self._libc.timer_delete(timer)
