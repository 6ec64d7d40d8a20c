"""The end of a process at a deadline, whatever it is doing."""

import ctypes
import sys
import time

_SIGEV_THREAD = 2  # from <signal.h>


class _SigEvent(ctypes.Structure):
    """``struct sigevent`` of 64-bit Linux, the same in glibc and musl."""

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
