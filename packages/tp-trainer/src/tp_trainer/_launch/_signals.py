"""Turn the signals that end a launch into one exception, and put the handlers back."""

import os
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1)


class Stopped(BaseException):
    """A signal asked the launch to end.

    Not an Exception: nobody on the way may take it for a failure.
    """

    def __init__(self, signum: int) -> None:
        super().__init__(f"stopped by {signal.Signals(signum).name}")
        self.signum = signum


class StopSignals:
    """Inside it SIGINT, SIGTERM, SIGHUP, SIGQUIT and SIGUSR1 raise ``Stopped`` in the main thread.

    In another thread it does nothing: Python gives signals to the main one only.

    Args:
        patience_s: How long the main thread may take, from a signal to leaving this block.
        on_deaf: Called with the signal, from another thread, when it took longer: it sits in native
            code, where Python runs no handler.
        pass_on: Called with SIGUSR1, before it is raised: what it means is for the program to know.
    """

    def __init__(
        self,
        *,
        patience_s: Callable[[], float] | None = None,
        on_deaf: Callable[[int], None] | None = None,
        pass_on: Callable[[int], None] | None = None,
    ) -> None:
        self._patience_s = patience_s
        self._on_deaf = on_deaf
        self._pass_on = pass_on
        self._before: dict[int, Any] = {}
        self._left = threading.Event()
        self._wake_before = -1
        self._write_fd = -1

    def __enter__(self) -> Self:
        """Take the signals over."""
        if threading.current_thread() is not threading.main_thread():
            return self
        for signum in _STOPPING:
            self._before[signum] = signal.signal(signum, self._stop)
        if self._on_deaf is not None and self._patience_s is not None:
            read_fd, self._write_fd = os.pipe()
            os.set_blocking(self._write_fd, False)
            self._wake_before = signal.set_wakeup_fd(self._write_fd, warn_on_full_buffer=False)
            threading.Thread(
                target=self._listen, args=(read_fd,), name="tp-launch-signals", daemon=True
            ).start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give them back; torch has taken some meanwhile."""
        self._left.set()
        if self._write_fd >= 0:
            signal.set_wakeup_fd(self._wake_before)
            os.close(self._write_fd)  # the thread reads the end of the pipe and ends
        for signum, handler in self._before.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)

    def ignore(self) -> None:
        """Hear no further signal: what is left to do takes a moment and must not be cut short."""
        self._left.set()
        for signum in self._before:
            signal.signal(signum, signal.SIG_IGN)

    def _stop(self, signum: int, _frame: FrameType | None) -> None:
        if signum == signal.SIGUSR1 and self._pass_on is not None:
            self._pass_on(signum)
        raise Stopped(signum)

    def _listen(self, read_fd: int) -> None:
        # The interpreter's C handler writes the number of a signal here at once.
        try:
            while numbers := os.read(read_fd, 16):
                stopping = [number for number in numbers if number in _STOPPING]
                if not stopping or self._patience_s is None or self._on_deaf is None:
                    continue
                if not self._left.wait(self._patience_s()):
                    self._on_deaf(stopping[0])
        finally:
            os.close(read_fd)
