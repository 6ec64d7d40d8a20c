"""The fork server, which has imported modules, and has no threads, locks or data; both of its sides."""

import array
import contextlib
import functools
import gc
import importlib
import os
import pickle
import select
import signal
import socket
import struct
import sys
import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tp_runner._workers._setup import unpickling
from tp_runner._workers._shared_memory import above_standard
from tp_runner._workers._start import UNKNOWN_EXIT, Process, bootstrap, ignore_interrupts, run_and_exit, spawn

_STATUS = struct.Struct("<ii")
_LENGTH = struct.Struct("<i")
ANSWER_S = 300.0
"""Limit for an answer, for a server that was stopped (SIGSTOP), say."""
MOST_SERVERS = 3
"""After this many servers that were killed before they forked a worker, a start is an error."""
_MOST_DESCRIPTORS = 250  # a little less than Linux passes with one message, 253
MOST_PASSED = _MOST_DESCRIPTORS - 7
"""The most descriptors of the program beside a worker's own five, its standard output and its error."""


class ForkServer:
    """The parent's side of one server."""

    def __init__(self, main: Callable[..., None], env: Mapping[str, str | None]) -> None:
        self._owner = 0  # no process's yet: stop() runs by __del__ where the start raises
        ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        ours, theirs = (socket.socket(fileno=above_standard(end.detach())) for end in ends)
        ours.settimeout(ANSWER_S)
        of_worker = main.__module__, main.__name__
        code = bootstrap(__name__, "serve", theirs.fileno(), *of_worker)
        self._process = spawn(code, [theirs.fileno()], env)
        theirs.close()
        self._socket = ours
        # From a request to its answer: all answers come through one socket.
        self._lock = threading.Lock()
        self._ended: dict[int, int] = {}
        self._owner = os.getpid()

    def preload(self, modules: Sequence[str]) -> None:
        """Name the modules that it imports before it forks; called once."""
        message = pickle.dumps((sys.path, modules), 5)
        with contextlib.suppress(ConnectionError):  # it was killed; the next request notices
            self._socket.sendall(_LENGTH.pack(len(message)) + message)

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
# This process's servers, by imported modules and changes of the environment, or `_UNUSED`. A server with
# changes lives as long as its workers: a program may have any number of environments.
_servers: weakref.WeakValueDictionary[tuple[Any, ...], ForkServer] = weakref.WeakValueDictionary()
_permanent_servers: list[ForkServer] = []  # the others
_UNUSED = ()  # the place of a server that does not know yet which modules it imports
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
            from tp_runner._workers._fleet import is_program_ending
            from tp_runner.errors import RunnerClosedError

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


def begin_server(main: Callable[..., None]) -> None:
    """Start the first server while this process finds out which modules it is to import."""
    with _servers_lock:
        if not _permanent_servers:
            _servers[_UNUSED] = _start_server(main, {})


def _start_server(main: Callable[..., None], env: Mapping[str, str | None]) -> ForkServer:
    from tp_runner._workers._fleet import watch  # here, and above: the server itself does without

    server = ForkServer(main, env)
    watch(server, last=True)
    if not env:
        _permanent_servers.append(server)
    return server


def _server(main: Callable[..., None], preload: Sequence[str], env: Mapping[str, str | None]) -> ForkServer:
    key = tuple(sorted(preload)), tuple(sorted(env.items()))
    with _servers_lock:
        server = _servers.get(key)
        if server is None or not server.is_alive():
            if server is not None:  # killed: its socket would stay open with it
                server.stop()
            server = None
            if not env:
                server = _servers.pop(_UNUSED, None)
            if server is None:
                server = _start_server(main, env)
            server.preload(key[0])
            _servers[key] = server
        return server


def _forget_all() -> None:
    """Forget the servers, in a forked copy: they are the parent's.

    An open socket in the copy would keep them alive after the parent's end
    (test_a_copy_of_the_program_does_not_keep_its_fork_server_alive).
    """
    for server in list(_servers.values()):
        server.forget()
    _servers.clear()
    _permanent_servers.clear()
    _servers_lock.release()


# No fork while another thread starts a server: the copy would not know the socket, and keep it open.
os.register_at_fork(
    before=_servers_lock.acquire, after_in_parent=_servers_lock.release, after_in_child=_forget_all
)


def serve(fd: int, module: str, function: str) -> None:
    """Run the server: fork workers, which run a function, on request until the parent closes its side."""
    parent = socket.socket(fileno=fd)
    main = getattr(importlib.import_module(module), function)
    # Most programs are of `__main__`: their pickles need cloudpickle, which each worker would import.
    _import("cloudpickle")
    length = parent.recv(_LENGTH.size, socket.MSG_WAITALL)
    if len(length) < _LENGTH.size:  # the parent has ended
        return
    (nbytes,) = _LENGTH.unpack(length)
    sys.path[:], preload = pickle.loads(parent.recv(nbytes, socket.MSG_WAITALL))
    for name in preload:
        _import(name)
    gc.freeze()  # the first full collection of a worker would copy all that is imported here: 0.2 s
    ignore_interrupts()  # again: a module of the program may have set a handler of its own
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


def _import(name: str) -> None:
    # Whatever it raises: the worker that needs it reports it with its traceback.
    with contextlib.suppress(Exception), unpickling:
        importlib.import_module(name)


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
