"""The start of worker processes: descriptors they inherit, fork, spawn, a fork server, limits before it."""

import abc
import array
import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

from tp_core.errors import ConfigError
from tp_core.output import flush_streams

from tp_runner._options import Settings
from tp_runner._workers._fleet import is_program_ending, watch
from tp_runner._workers._setup import HASH_SEED, changed_environ, check_nesting, unpickling
from tp_runner._workers._shared_memory import above_standard
from tp_runner.errors import RunnerClosedError

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
    from pathlib import Path  # each start without torch is the shorter for it

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


# -- The fork server, which has imported modules, and has no threads, locks or data ----------------

_STATUS = struct.Struct("<ii")
ANSWER_S = 300.0
"""Limit for an answer, for a server that was stopped (SIGSTOP), say."""
MOST_SERVERS = 3
"""After this many servers that were killed before they forked a worker, a start is an error."""
_MOST_DESCRIPTORS = 250  # a little less than Linux passes with one message, 253
MOST_PASSED = _MOST_DESCRIPTORS - 7
"""The most descriptors of the program beside a worker's own five, its standard output and its error."""


class ForkServer:
    """The parent's side of one server."""

    def __init__(
        self, main: Callable[..., None], preload: Sequence[str], env: Mapping[str, str | None]
    ) -> None:
        self._owner = 0  # no process's yet: stop() runs by __del__ where the start raises
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours, theirs = (socket.socket(fileno=above_standard(end.detach())) for end in ends)
        ours.settimeout(ANSWER_S)
        of_worker = main.__module__, main.__name__
        code = bootstrap(__name__, "serve", theirs.fileno(), tuple(preload), *of_worker)
        self._process = spawn(code, [theirs.fileno()], env)
        theirs.close()
        self._socket = ours
        # From a request to its answer: all answers come through one socket.
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}
        self._owner = os.getpid()

    def fork(self, descriptors: Sequence[int]) -> Process:
        with self._lock, contextlib.ExitStack() as opened:
            # The standard output and error of this moment: the server has those of its own start
            # (test_workers_write_where_their_runner_does_and_run_what_they_left_for_the_end).
            standard = [_open_standard(descriptor, opened) for descriptor in (1, 2)]
            rights = array.array("i", [*standard, *descriptors])
            try:
                self._socket.sendmsg([b"f"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
                # The server first reports those that ended, then the new one.
                while True:
                    pid, status = self._receive()
                    if status == _STARTED:
                        return _Grandchild(pid, self)
                    self._ended[pid] = status
            except BaseException:
                # No answer in time, or a signal handler has raised: the late answer would pass for that to
                # the next request, and a kill would hit another process.
                self.stop()
                raise

    def exitcode(self, pid: int) -> int | None:
        """Return how a worker ended, without waiting; ``None`` if it has not."""
        with self._lock:
            answers = select.poll()  # select() refuses descriptors from 1024 on
            answers.register(self._socket, select.POLLIN)
            while answers.poll(0):
                other, status = self._receive()
                self._ended[other] = status
            return self._ended.pop(pid, None)

    @property
    def pid(self) -> int:
        return self._process.pid

    def is_alive(self) -> bool:
        """Return whether it can start more workers, in this process."""
        return self._owner == os.getpid() and self._process.wait(0) is None

    def forget(self) -> None:
        self._owner = 0
        self._socket.close()

    def stop(self) -> None:
        if self._owner and self._owner == os.getpid():
            self.forget()
            self._process.wait(5)
            if self in _permanent_servers:
                _permanent_servers.remove(self)

    at_exit = __del__ = stop

    def _receive(self) -> tuple[int, int]:
        data = b""
        while len(data) < _STATUS.size:
            more = self._socket.recv(_STATUS.size - len(data))
            if not more:
                msg = "the fork server has ended; start_method='spawn' does without one"
                raise ConnectionResetError(msg)
            data += more
        pid, status = _STATUS.unpack(data)
        return pid, status


def _open_standard(descriptor: int, opened: contextlib.ExitStack) -> int:
    """Return a standard descriptor, or one that goes nowhere if the program has closed it."""
    try:
        os.fstat(descriptor)
    except OSError:
        descriptor = os.open(os.devnull, os.O_WRONLY)
        opened.callback(os.close, descriptor)
    return descriptor


class _Grandchild(Process):
    def __init__(self, pid: int, server: ForkServer) -> None:
        super().__init__(pid)
        self._server = server

    def _poll(self) -> int | None:
        try:
            return self._server.exitcode(self.pid)
        except (OSError, ValueError):  # the server has ended, and with it the exit status
            try:
                os.kill(self.pid, 0)
            except ProcessLookupError:
                return UNKNOWN_EXIT
            return None


_STARTED = -1000  # in the place of an exit status: this one was just started
# This process's servers, by imported modules and changes of the environment. A server with changes lives as
# long as its workers: a program may have any number of environments.
_servers: weakref.WeakValueDictionary[tuple[Any, ...], ForkServer] = weakref.WeakValueDictionary()
_permanent_servers: list[ForkServer] = []  # the others
_servers_lock = threading.RLock()  # held in each fork, below


def fork_by_server(
    main: Callable[..., None],
    preload: Sequence[str],
    env: Mapping[str, str | None],
    descriptors: Sequence[int],
) -> Process:
    """Fork a worker, which runs ``main``, from a server that has imported ``preload``, started if needed."""
    for _ in range(MOST_SERVERS):
        server = _server(main, preload, env)
        try:
            return server.fork(descriptors)
        except TimeoutError:
            msg = f"the fork server, process {server.pid}, does not answer; start_method='spawn' needs none"
            raise ConnectionError(msg) from None
        except OSError as error:
            if is_program_ending() and threading.current_thread().daemon:
                # The main thread has stopped it just now, and Python is about to stop this one.
                msg = "the program has come to its end"
                raise RunnerClosedError(msg) from None
            if not isinstance(error, ConnectionError):
                raise
            # It was killed, and has been stopped: a new one takes its place.
    msg = (
        f"{MOST_SERVERS} fork servers, one in the place of the other, were killed before they had forked a "
        "worker; start_method='spawn' needs none"
    )
    raise ConnectionError(msg)


def _server(main: Callable[..., None], preload: Sequence[str], env: Mapping[str, str | None]) -> ForkServer:
    key = tuple(sorted(preload)), tuple(sorted(env.items()))
    with _servers_lock:
        server = _servers.get(key)
        if server is None or not server.is_alive():
            if server is not None:  # killed: its socket would stay open with it
                server.stop()
            server = _servers[key] = ForkServer(main, key[0], env)
            watch(server, last=True)
            if not env:
                _permanent_servers.append(server)
        return server


def _forget_all() -> None:
    """Forget the servers, in a forked copy: they are the parent's.

    An open socket in the copy would keep them alive after the parent's end
    (test_a_copy_of_the_program_does_not_keep_its_fork_server_alive).
    """
    for server in list(_servers.values()):
        server.forget()
    _servers.clear()
    _servers_lock.release()


# No fork while another thread starts a server: the copy would not know the socket, and keep it open.
os.register_at_fork(
    before=_servers_lock.acquire, after_in_parent=_servers_lock.release, after_in_child=_forget_all
)


def serve(fd: int, preload: Sequence[str], module: str, function: str) -> None:
    """Run the server: fork workers, which run a function, on request until the parent closes its side."""
    # Most programs are of `__main__`: their pickles need cloudpickle, which each worker would import.
    for name in ("cloudpickle", *preload):
        # Whatever it raises: the worker that needs it reports it with its traceback.
        with contextlib.suppress(Exception), unpickling:
            importlib.import_module(name)
    main = getattr(importlib.import_module(module), function)
    gc.freeze()  # the first full collection of a worker would copy all that is imported here: 0.2 s
    ignore_interrupts()  # again: a module of the program may have set a handler of its own
    parent = socket.socket(fileno=fd)
    wakeup, wakeup_end = os.pipe()
    os.set_blocking(wakeup_end, False)  # set_wakeup_fd refuses a blocking descriptor
    # A handler that does nothing: Python writes to the wakeup descriptor only for signals that have one.
    # Without it the end of a worker would not wake the poll below.
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wakeup_end)
    poll = select.poll()  # not select(), as above: the socket has the number that it has in the program
    for descriptor in (fd, wakeup):
        poll.register(descriptor, select.POLLIN)
    while True:
        ready = dict(poll.poll())
        if wakeup in ready:
            os.read(wakeup, 4096)
        _report_exits(parent)
        if fd in ready:
            descriptors = _receive_request(parent)
            if descriptors is None:
                parent.close()
                return
            pid = os.fork()
            if not pid:
                # The pipe is shared with the server: the worker's signals would wake it.
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                parent.close()
                os.close(wakeup)
                os.close(wakeup_end)
                for standard, descriptor in zip((1, 2), descriptors, strict=False):
                    os.dup2(descriptor, standard)
                    os.close(descriptor)
                run_and_exit(functools.partial(main, *descriptors[2:]))
            for descriptor in descriptors:
                os.close(descriptor)
            with contextlib.suppress(ConnectionError):  # the parent was killed; the next read notices
                parent.sendall(_STATUS.pack(pid, _STARTED))


def _report_exits(parent: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if not pid:
            return
        with contextlib.suppress(OSError):
            parent.sendall(_STATUS.pack(pid, os.waitstatus_to_exitcode(status)))


def _receive_request(parent: socket.socket) -> list[int] | None:
    rights = array.array("i")
    try:
        data, ancillary, _, _ = parent.recvmsg(1, socket.CMSG_SPACE(_MOST_DESCRIPTORS * rights.itemsize))
    except ConnectionResetError:
        return None
    if not data:
        return None
    for level, kind, content in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            rights.frombytes(content[: len(content) - len(content) % rights.itemsize])
    return list(rights)


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
