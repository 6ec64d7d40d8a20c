"""Signal handlers of a launch: they raise one exception, and are restored at the end."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

from tp_core.launching import discard_closed_terminal

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)
_UNRESPONSIVE_S = 2.0  # how long native code may keep Python from running a handler


class Stopped(BaseException):
    """Raised when a signal asks the launch to end.

    Not an ``Exception``: it passes through torch's agent, which counts each Exception as a failure of the
    job.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopSignals:
    """A context in which SIGINT, SIGTERM, SIGHUP, SIGQUIT and SIGUSR1 raise ``Stopped`` in the main thread.

    The first signal counts; after it, a second Ctrl-C only shortens the wait. Outside the main thread the
    context does nothing: Python runs handlers only there.

    Args:
        on_stop: Called with the signal, before the exception: ends the ranks, which takes time.
        on_hurry: Called at a second Ctrl-C.
        on_unresponsive: Called with the signal, from another thread, if the main thread is stuck in native
            code, where Python runs no handler, or has not left the context in time.
        grace_s: How long the main thread may take to leave the context.
    """

    def __init__(
        self,
        *,
        on_stop: Callable[[int], None] | None = None,
        on_hurry: Callable[[], None] | None = None,
        on_unresponsive: Callable[[int], None] | None = None,
        grace_s: float = 0.0,
    ) -> None:
        self._on_stop = on_stop
        self._on_hurry = on_hurry
        self._on_unresponsive = on_unresponsive
        self._grace_s = grace_s
        self._received = threading.Event()  # the first signal has come
        self._left = threading.Event()  # the main thread has left the context, or is about to
        # What the context restores: the handlers, and the wakeup descriptor; and the pipe that replaces that.
        self._before: dict[int, Any] = {}
        self._wake_before = -1
        self._write_fd = -1

    def __enter__(self) -> Self:
        """Set the handlers."""
        if threading.current_thread() is not threading.main_thread():
            return self
        for signum in _STOPPING:
            # nohup starts a program with SIGHUP ignored, and it must outlive its terminal.
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                self._before[signum] = signal.signal(signum, self._stop)
        if self._on_unresponsive is not None:
            # Python handlers run only when the main thread is back in Python, but torch waits for hosts and
            # barriers in native code, for minutes. C code writes to the wakeup descriptor at once.
            read_fd, self._write_fd = os.pipe()
            os.set_blocking(self._write_fd, False)  # set_wakeup_fd refuses a blocking descriptor
            self._wake_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
            threading.Thread(
                target=self._listen,
                args=(read_fd, self._on_unresponsive),
                name="tp-launch-signals",
                daemon=True,
            ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Restore the handlers, also those that torch has replaced since."""
        self._left.set()
        if self._write_fd >= 0:
            signal.set_wakeup_fd(self._wake_before)
            os.close(self._write_fd)  # the thread reads the end of the pipe and returns
        for signum, handler in self._before.items():
            if handler is not None:
                before = handler
            else:
                before = signal.SIG_DFL
            signal.signal(signum, before)

    def ignore(self) -> None:
        """Ignore further signals: the cleanup is short and must not be interrupted."""
        self._left.set()
        for signum in self._before:
            signal.signal(signum, signal.SIG_IGN)

    def _stop(self, signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGHUP:  # otherwise printing to the closed terminal would raise an OSError
            discard_closed_terminal()
        if self._received.is_set():
            if signum == signal.SIGINT and self._on_hurry is not None:
                self._on_hurry()
            return
        self._received.set()
        if self._on_stop is not None:
            self._on_stop(signum)
        raise Stopped(signum)

    def _listen(self, read_fd: int, on_unresponsive: Callable[[int], None]) -> None:
        try:
            while numbers := os.read(read_fd, 16):
                stopping = [number for number in numbers if number in self._before]
                if stopping and not (
                    (self._left.is_set() or self._received.wait(_UNRESPONSIVE_S))
                    and self._left.wait(self._grace_s)
                ):
                    on_unresponsive(stopping[0])
        finally:
            os.close(read_fd)
