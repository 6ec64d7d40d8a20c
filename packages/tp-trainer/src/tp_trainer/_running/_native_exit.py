"""Ends the process at a deadline, whatever it is doing: without Python, and with a status of choice.

A timer of the kernel has the C library call ``_exit`` in a thread of its own. So this works where
native code keeps the interpreter's lock, and no thread of Python gets a turn.
"""

import ctypes
import sys
import time

__all__ = ["NativeExit"]

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


class NativeExit:
    """A deadline that can be set again and again; each time replaces the one before.

    Args:
        status: The exit status of the process.

    Raises:
        OSError: This system has no such timers.

    Example:
        >>> deadline = NativeExit(124)
        >>> deadline.set(60.0)
        >>> deadline.cancel()
    """

    def __init__(self, status: int) -> None:
        if sys.platform != "linux" or ctypes.sizeof(ctypes.c_void_p) != 8:
            msg = "timers that end a process are known of 64-bit Linux alone"
            raise OSError(msg)
        self._libc = ctypes.CDLL(None)
        leave = ctypes.cast(self._libc._exit, ctypes.c_void_p)
        event = _SigEvent(value=status, notify=_SIGEV_THREAD, function=leave)
        self._timer = ctypes.c_void_p()
        if self._libc.timer_create(time.CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer)):
            msg = "the kernel gives no timer"
            raise OSError(msg)

    def set(self, seconds: float) -> None:
        """End the process so many seconds from now."""
        whole = int(seconds)
        spec = _TimerSpec(value=_TimeSpec(whole, int((seconds - whole) * 1e9)))
        self._libc.timer_settime(self._timer, 0, ctypes.byref(spec), None)

    def cancel(self) -> None:
        """Cancel the deadline."""
        self.set(0.0)

    def __del__(self) -> None:
        timer = getattr(self, "_timer", None)
        if timer:
            self._libc.timer_delete(timer)
