"""The start of worker processes: descriptors they inherit, fork, spawn, limits before it."""

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
from typing import Any, NoReturn

from tp_core.errors import ConfigError
from tp_core.output import flush_streams

from tp_runner._options import Settings
from tp_runner._workers._setup import HASH_SEED, changed_environ, check_nesting
from tp_runner._workers._shared_memory import above_standard

# -- Inherited and private descriptors --------------------------------------------------------
#
# Locks, values, queues and events of multiprocessing travel only to a process that is being started. While a
# program is pickled, multiprocessing's own reducers see a process that is being spawned. The descriptors that
# they hand over are kept, and every worker gets them at its start.
#
# The end of a pipe reports a parent's death to its workers, and a worker's death to its parent. A process
# that was forked in between and holds the other end would hide it: forked copies close such ends.

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
        reader, writer = os.pipe()
        ends = above_standard(reader), above_standard(writer)
        _private.update(ends)
    return ends


def open_pipes(count: int) -> list[tuple[int, int]]:
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
    with _private_lock:
        _private.difference_update(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


@contextlib.contextmanager
def inherit_descriptors(*descriptors: int) -> Iterator[None]:
    """Let the copies that this thread forks in the block keep these descriptors."""
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


UNKNOWN_EXIT = 1 << 16
"""In the place of an exit status that somebody else has taken."""


class Process(abc.ABC):
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
    def _poll(self) -> int | None:
        try:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
        except ChildProcessError:  # the program ignores SIGCHLD, or waits for every child of this process
            return UNKNOWN_EXIT
        if pid:
            return os.waitstatus_to_exitcode(status)
        return None


@contextlib.contextmanager
def _interrupts_wait() -> Iterator[None]:
    """Block Ctrl-C in this thread, and so in a process that is started within the context.

    A terminal sends Ctrl-C to workers, too, and the parent decides what it means. One that comes while
    their interpreter starts would be a traceback of theirs
    (test_ctrl_c_while_workers_start_is_the_program_s_alone).
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def ignore_interrupts() -> None:
    """Ignore Ctrl-C in a process that was started by this module, whatever has come since its start."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])


def fork(child: Callable[[], None]) -> Process:
    flush_streams()  # or the copy would write the buffered text a second time
    pause_openmp()
    with _interrupts_wait():
        pid = os.fork()
        if not pid:
            ignore_interrupts()
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
            flush_streams()
        finally:
            os._exit(status)  # it never returns: the frames below are the parent's


def pause_openmp() -> None:
    """Have GNU's OpenMP end the threads of this one, which a copy of the process would wait for in vain.

    Raises:
        ConfigError: It is too old for that, and computes with several threads.
    """
    if "torch" not in sys.modules:
        return
    import ctypes  # each start without torch is the shorter for it

    for path in _loaded_libraries("libgomp"):
        library = ctypes.CDLL(path)
        pause = getattr(library, "omp_pause_resource_all", None)
        if pause is not None:
            pause(_PAUSE_HARD)
        elif library.omp_get_max_threads() > 1:
            msg = (
                "start_method='fork' is not safe here: this process computes with several threads of an "
                f"OpenMP that cannot end them ({path}), and a copy of it would wait for them for ever; take "
                "'forkserver' or 'spawn', or OMP_NUM_THREADS=1"
            )
            raise ConfigError(msg)


_PAUSE_HARD = 2  # omp_pause_hard of OpenMP 5.0


def _loaded_libraries(name: str) -> set[str]:
    """Return the files of the shared libraries of a name that this process has loaded, where it knows."""
    from pathlib import Path  # as above

    try:
        lines = Path("/proc/self/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return set()
    # Of thousands of lines, at each fork, few are looked at.
    fields = [line.split(maxsplit=5) for line in lines if f"/{name}" in line]
    return {path for *_, path in fields if Path(path).name.startswith(name)}


def spawn(code: str, descriptors: Sequence[int], env: Mapping[str, str | None]) -> Process:
    """Run ``code`` in a new interpreter that shares ``descriptors``, with changes of the environment."""
    import subprocess  # a fork need not wait for it

    with _interrupts_wait():
        process = subprocess.Popen(
            [sys.executable, *_flags(), "-c", code],
            pass_fds=tuple(descriptors),
            stdin=subprocess.DEVNULL,
            env=HASH_SEED | changed_environ(env),
        )
    # This module waits for it: Popen must neither wait, nor warn that it is still running.
    process.returncode = 0
    return _Child(process.pid)


def bootstrap(module: str, function: str, *arguments: Any) -> str:
    """Return code for a new interpreter that finds modules where this one does."""
    # The path is first: a file of the current folder may have the name of any module. Then Ctrl-C, before
    # anything that takes long; ignore_interrupts() is in a module of ours.
    path = f"import sys; sys.path[:] = {sys.path!r}"
    ignore = (
        "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN); "
        "signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])"
    )
    # What modules define makes no garbage: looking for some takes a fifth of the time of these imports.
    imports = f"import gc; gc.disable(); from {module} import {function}; gc.enable()"
    return f"{path}; {ignore}; {imports}; {function}(*{arguments!r})"


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


def check_start(devices: tuple[str, ...], settings: Settings) -> None:
    """Refuse workers that could not start, or would fail without a clear error."""
    if settings.start_method == "fork":
        _refuse_accelerators(devices)
    if settings.max_memory_per_worker is not None and private_memory(os.getpid()) is None:
        msg = (
            f"max_memory_per_worker={settings.max_memory_per_worker} needs Linux's /proc, which says how "
            "much a process holds; give max_items_per_worker here"
        )
        raise ConfigError(msg)
    check_nesting(len(devices))


def _refuse_accelerators(devices: tuple[str, ...]) -> None:
    # Also where torch says that it is not initialized: whoever asks how many devices there are, as the check
    # of `devices` does, has called the driver, and no copy of this process can use it any more.
    for kind in sorted({device.partition(":")[0] for device in devices} - {"cpu"}):
        name = kind.upper()
        msg = (
            f"start_method='fork' cannot have {name} devices: this process has asked their driver, and no "
            "forked copy of it can use them; take 'forkserver' or 'spawn'"
        )
        raise ConfigError(msg)


_PROC = "/proc"


def private_memory(pid: int) -> int | None:
    """Return how many bytes a process shares with nobody; ``None`` where the system does not say."""
    from pathlib import Path

    try:
        lines = Path(_PROC, str(pid), "smaps_rollup").read_text().splitlines()
    except OSError:
        return None
    return sum(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_"))
