"""Starting worker processes by fork, spawn or a fork server, and learning how they ended."""

import abc
import atexit
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from tp_runner._workers._setup import changed_environ


class Process(abc.ABC):
    """A process that was started."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._exitcode: int | None = None

    def wait(self, timeout_s: float) -> int | None:
        """Return its exit status, negative for a signal; ``None`` if it has not ended in time."""
        deadline = time.monotonic() + timeout_s
        pause_s = 0.0
        while self._exitcode is None:
            self._exitcode = self._poll()
            if self._exitcode is None:
                left_s = deadline - time.monotonic()
                if left_s <= 0:
                    return None
                if pause_s:  # nobody could wait for its end itself, or who tells how it ended is late
                    time.sleep(min(pause_s, left_s))
                else:
                    _await_end(self.pid, left_s)
                pause_s = min(pause_s * 2 or 0.0005, 0.05)
        return self._exitcode

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if self.wait(0) is None:
            os.kill(self.pid, signal.SIGKILL)

    @abc.abstractmethod
    def _poll(self) -> int | None:
        """Return the exit status without waiting."""


def _await_end(pid: int, timeout_s: float) -> None:
    """Wait until a process has ended, where the system can tell of it."""
    try:
        fd = os.pidfd_open(pid)
    except (AttributeError, OSError):  # only Linux has it; or there is nobody any more
        return
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll(timeout_s * 1000)
    finally:
        os.close(fd)


class _Child(Process):
    """A child of this process."""

    def _poll(self) -> int | None:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # somebody else waited for every child of this process
            return 255
        return os.waitstatus_to_exitcode(status) if pid else None


def fork(child: Callable[[], None]) -> Process:
    """Run ``child`` in a copy of this process."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        end_with(child)
    return _Child(pid)


def end_with(child: Callable[[], None]) -> NoReturn:
    """Run ``child`` in a process that was just forked; end it as multiprocessing ends one.

    Executors that it left open end, what it registered with ``atexit`` runs, and what it put into queues
    of multiprocessing is written.
    """
    status = 1
    try:
        atexit._clear()  # as multiprocessing does: those are the parent's
        try:
            child()
        finally:
            threading._shutdown()  # type: ignore[attr-defined]  # as the interpreter's own end begins
            if (util := sys.modules.get("multiprocessing.util")) is not None:
                util._run_finalizers()
            atexit._run_exitfuncs()
        status = 0
    except BaseException:  # noqa: BLE001 - nothing may return into the parent's frames
        import traceback

        traceback.print_exc()
    finally:
        try:
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(status)


def spawn(code: str, descriptors: Sequence[int], env: Mapping[str, str | None]) -> Process:
    """Run ``code`` in a new interpreter that shares ``descriptors``, with changes of the environment."""
    import subprocess  # a fork need not wait for it

    process = subprocess.Popen(
        [sys.executable, *_flags(), "-c", code],
        pass_fds=tuple(descriptors),
        stdin=subprocess.DEVNULL,
        env=changed_environ(env) if env else None,
    )
    process.returncode = 0  # this module waits for it; Popen shall neither wait nor complain
    return _Child(process.pid)


def bootstrap(module: str, function: str, *arguments: Any) -> str:
    """Return code for a new interpreter that finds modules where this one does."""
    return (
        f"import sys; sys.path[:] = {sys.path!r}; from {module} import {function}; {function}(*{arguments!r})"
    )


def _flags() -> list[str]:
    """Return what a new interpreter needs to behave like this one."""
    flags = [f"-W{option}" for option in sys.warnoptions]
    flags += [f"-X{key}" if value is True else f"-X{key}={value}" for key, value in sys._xoptions.items()]
    if sys.flags.no_site:
        flags.append("-S")
    if sys.flags.dont_write_bytecode:
        flags.append("-B")
    if sys.flags.optimize:
        flags.append("-" + "O" * sys.flags.optimize)
    return flags
