"""Start of worker processes by fork or spawn: inherited descriptors, their end, limits."""

import abc
import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tp_core.errors import ConfigError

from tp_runner._options import Settings
from tp_runner._workers._setup import changed_environ, nesting_depth

# -- Inherited and private descriptors --------------------------------------------------------
#
# Locks, values, queues and events of multiprocessing travel only to a process that is being started. While a
# program is pickled, multiprocessing's own reducers see a process that is being spawned. The descriptors that
# they hand over are kept, and every worker gets them at its start.
#
# The end of a pipe reports a parent's death to its workers, and a worker's death to its parent. A process
# that was forked meanwhile and holds the other end would hide it: forked copies close such ends.

_passed: tuple[int, ...] = ()  # the descriptors that this worker was started with


class _PassedFd:
    """A descriptor, by its place among those that a worker is started with."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """Return a descriptor of its own, in the worker."""
        return os.dup(_passed[self._place])


class _Spawning:
    """The methods of a Popen that multiprocessing's reducers call while a process is being spawned."""

    DupFd = _PassedFd

    def __init__(self, descriptors: list[int]) -> None:
        self._private = descriptors

    def duplicate_for_child(self, fd: int) -> int:
        """Keep a duplicate of a descriptor for the workers; return its place."""
        self._private.append(os.dup(fd))
        return len(self._private) - 1


@contextlib.contextmanager
def collect_descriptors(descriptors: list[int]) -> Iterator[None]:
    """Let multiprocessing's objects be pickled; add what workers must be started with to ``descriptors``."""
    if "multiprocessing" not in sys.modules:  # then nobody has made one
        yield
        return
    from multiprocessing import context

    # Not documented: without it, multiprocessing refuses to pickle its locks and queues
    # (test_locks_values_queues_and_events_reach_the_workers).
    before = context.get_spawning_popen()
    context.set_spawning_popen(_Spawning(descriptors))  # type: ignore[arg-type]  # as much as is asked of it
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def adopt_descriptors(descriptors: Sequence[int]) -> None:
    """Note the descriptors that this worker was started with."""
    global _passed  # noqa: PLW0603 - it is about the process
    _passed = tuple(descriptors)
    for fd in _passed:
        os.set_inheritable(fd, False)


_private: set[int] = set()
# Held during each fork (below): another thread's new pipe is either in the set, so that the copy closes it,
# or not open yet. An end that stayed open in a copy would hide a death from the reader of the pipe.
_private_lock = threading.Lock()
_inheriting = threading.local()


def open_pipe() -> tuple[int, int]:
    """Open a pipe with both ends private from the first moment, whatever other threads fork."""
    with _private_lock:
        ends = os.pipe()
        _private.update(ends)
    return ends


def open_pipes(count: int) -> list[tuple[int, int]]:
    """Open several such pipes, or none."""
    opened: list[tuple[int, int]] = []
    try:
        for _ in range(count):
            opened.append(open_pipe())
    except OSError:
        for ends in opened:
            close_descriptors(*ends)
        raise
    return opened


def make_private(*descriptors: int) -> None:
    """Have forked copies of this process close these descriptors at once."""
    with _private_lock:
        _private.update(descriptors)


def close_descriptors(*descriptors: int) -> None:
    """Close private descriptors."""
    with _private_lock:
        _private.difference_update(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


@contextlib.contextmanager
def inherit_descriptors(*descriptors: int) -> Iterator[None]:
    """Let the copies that this thread forks meanwhile keep these descriptors."""
    _inheriting.descriptors = descriptors
    try:
        yield
    finally:
        _inheriting.descriptors = ()


def _after_in_child() -> None:
    _private_lock.release()
    keep = getattr(_inheriting, "descriptors", ())
    for descriptor in _private.difference(keep):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _private.clear()


os.register_at_fork(
    before=_private_lock.acquire, after_in_parent=_private_lock.release, after_in_child=_after_in_child
)


# -- Processes --------------------------------------------------------------------------------


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
                if pause_s:  # there is no pidfd, or the server is late to report the exit status
                    time.sleep(min(pause_s, left_s))
                else:
                    _await_exit(self.pid, left_s)
                pause_s = min(pause_s * 2 or 0.0005, 0.05)
        return self._exitcode

    def kill(self) -> None:
        """Kill it, if it has not ended."""
        if self.wait(0) is None:
            # A child of the fork server may end, and be waited for there, just now.
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)

    @abc.abstractmethod
    def _poll(self) -> int | None:
        """Return the exit status without waiting."""


def _await_exit(pid: int, timeout_s: float) -> None:
    """Wait until a process has ended, where the system has descriptors of processes."""
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
        except ChildProcessError:  # other code has waited for every child of this process
            return 255
        return os.waitstatus_to_exitcode(status) if pid else None


def fork(child: Callable[[], None]) -> Process:
    """Run ``child`` in a copy of this process."""
    sys.stdout.flush()  # or the copy would write the buffered text a second time
    sys.stderr.flush()
    pid = os.fork()
    if not pid:
        run_and_exit(child)
    return _Child(pid)


def run_and_exit(child: Callable[[], None]) -> NoReturn:
    """Run ``child`` in a process that was just forked; end it as multiprocessing ends one.

    Executors that it left open end, what it registered with ``atexit`` runs, and what it put into queues
    of multiprocessing is written.
    """
    status = 1
    try:
        atexit._clear()  # private, as multiprocessing does it: the handlers are the parent's
        try:
            child()
        finally:
            # Private: the interpreter's own end begins with it. It joins threads that are no daemons and ends
            # executors (test_an_executor_that_a_worker_leaves_open_ends_with_it).
            threading._shutdown()  # type: ignore[attr-defined]  # typeshed has no private names
            if (util := sys.modules.get("multiprocessing.util")) is not None:
                util._run_finalizers()  # private: queues write what was put into them
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
            os._exit(status)  # it never returns: the frames below are the parent's


def spawn(code: str, descriptors: Sequence[int], env: Mapping[str, str | None]) -> Process:
    """Run ``code`` in a new interpreter that shares ``descriptors``, with changes of the environment."""
    import subprocess  # a fork need not wait for it

    process = subprocess.Popen(
        [sys.executable, *_flags(), "-c", code],
        pass_fds=tuple(descriptors),
        stdin=subprocess.DEVNULL,
        env=changed_environ(env) if env else None,
    )
    # This module waits for it: Popen must neither wait, nor warn that it is still running.
    process.returncode = 0
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


# -- Limits before a start, memory of a process -----------------------------------------------

DEEPEST = 10
"""The deepest nesting of runners within workers; deeper ones are refused."""


def check_start(devices: tuple[str, ...], settings: Settings) -> None:
    """Refuse workers that could not start, or would fail without a clear error.

    Raises:
        ConfigError: Runners start runners without an end, CUDA would be forked, or nobody can say how much
            memory a worker holds.
    """
    _require_forkable(devices, settings)
    if settings.max_memory_per_worker is not None and private_memory(os.getpid()) is None:
        msg = (
            f"max_memory_per_worker={settings.max_memory_per_worker} needs Linux's /proc, which says how "
            "much a process holds; give max_items_per_worker here"
        )
        raise ConfigError(msg)
    if nesting_depth() >= DEEPEST:
        msg = (
            f"this runner would be started by a worker, by a worker, ... {DEEPEST} deep; a program that "
            "starts runners at import time does that without an end: put it under "
            "if __name__ == '__main__'"
        )
        raise ConfigError(msg)


def _require_forkable(devices: tuple[str, ...], settings: Settings) -> None:
    if settings.start_method != "fork":
        return
    for kind in sorted({device.partition(":")[0] for device in devices} - {"cpu"}):
        import torch

        is_initialized = getattr(torch.get_device_module(kind), "is_initialized", None)
        if is_initialized is not None and is_initialized():
            name = kind.upper()
            msg = (
                f"start_method='fork' with {name} devices needs a parent that has not used {name}, and "
                "this one has; take 'forkserver' or 'spawn'"
            )
            raise ConfigError(msg)


_PROC = Path("/proc")
_CGROUPS = Path("/sys/fs/cgroup")


def private_memory(pid: int) -> int | None:
    """Return how many bytes a process shares with nobody; ``None`` where the system does not say."""
    try:
        lines = (_PROC / str(pid) / "smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))


class OomKills:
    """Counter of deaths for want of memory: the system counts its kills, and does not name the killed."""

    def __init__(self) -> None:
        self._explained = _count_oom_kills()

    def explain_one(self) -> bool:
        """Return whether there was one more such kill than before; it is counted then."""
        count = _count_oom_kills()
        if self._explained is None or count is None or count <= self._explained:
            return False
        self._explained += 1
        return True


def _count_oom_kills() -> int | None:
    """Return how many processes of this control group were killed for want of memory so far."""
    try:
        lines = (_PROC / "self" / "cgroup").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        mount = _CGROUPS / controllers
        # A container may see its own group as the root, and read the name that it has outside.
        for folder in (mount / path.lstrip("/"), mount):
            for name in ("memory.events", "memory.oom_control"):  # of version 2 and version 1
                try:
                    words = (folder / name).read_text().split()
                except OSError:
                    continue
                if "oom_kill" in words:
                    return int(words[words.index("oom_kill") + 1])
    return None
