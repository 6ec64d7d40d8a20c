"""A worker process: reads chunks from one pipe, writes results to another."""

import contextlib
import fcntl
import os
import pickle
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tp_runner import _at_fork, _wire
from tp_runner._arena import Mapping
from tp_runner._batching import Batching
from tp_runner._board import Board
from tp_runner._failure import END, INIT, ITEM, Failure
from tp_runner._packing import unpack
from tp_runner._sender import Reply, Sender
from tp_runner._surroundings import limit_torch, prepare
from tp_runner._work import IDLE, run_chunk

__all__ = ["Descriptors", "Setup", "WorkerProcess", "die_with_parent", "main"]


@dataclass(frozen=True, slots=True)
class Descriptors:
    """The files that a worker shares with its parent."""

    requests: int
    replies: int
    life: int
    arena: int
    board: int


@dataclass(frozen=True, slots=True)
class Setup:
    """What a worker is told before its first chunk.

    Attributes:
        program: What it runs, or its pickle.
        device: Its device.
        worker: Its number.
        threads: How many threads it may compute with.
        timed: Whether it notes when each item began.
        batching: How items are put together.
        log_level: The level of the parent's root logger.
    """

    program: Any
    device: str
    worker: int
    threads: int
    timed: bool
    batching: Batching | None
    log_level: int

    def pickled(self) -> bytes:
        """Return this with what a process needs to be like this one before it unpickles it.

        A fork server is as old as the first runner: its directory and environment are those of then.
        """
        place = sys.path, os.getcwd(), dict(os.environ)  # noqa: PTH109 - a string travels lighter
        return pickle.dumps((place, pickle.dumps(self, 5)), 5)


def main(requests: int, replies: int, life: int, arena: int, board: int) -> None:
    """Run a worker in a fresh process, whose parent sends the setup first."""
    die_with_parent(life)
    header = _wire.read_exactly(requests, _wire.REQUEST.size)
    if header is None:
        return
    length = _wire.REQUEST.unpack(header)[3]
    blob = _wire.read_exactly(requests, length)
    if blob is None:
        return
    descriptors = Descriptors(requests, replies, life, arena, board)
    (path, folder, environment), pickled = pickle.loads(blob)
    sys.path[:] = path
    os.environ.clear()
    os.environ.update(environment)
    with contextlib.suppress(OSError):  # it may be gone, which only those who use it need to know
        os.chdir(folder)
    setup = pickle.loads(pickled)
    WorkerProcess(descriptors, setup).run()


def die_with_parent(life: int) -> None:
    """Have the kernel kill this process when the other end of the pipe ``life`` closes.

    It needs no thread and no turn of the interpreter: it works in the middle of a long computation
    too. Where the system cannot, a thread waits for the end of the pipe.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(life, fcntl.F_GETFL)
        fcntl.fcntl(life, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
        with contextlib.suppress(BlockingIOError):  # the usual case: it is still open
            if not os.read(life, 1):
                os._exit(1)
        return
    threading.Thread(target=_wait_for_end, args=(life,), daemon=True).start()


def _wait_for_end(life: int) -> None:
    os.read(life, 1)
    os._exit(1)


class WorkerProcess:
    """The loop of one worker."""

    def __init__(self, descriptors: Descriptors, setup: Setup) -> None:
        # A process that the user's code forks or starts must not hide this one's death from its parent.
        private = descriptors.requests, descriptors.replies, descriptors.life
        _at_fork.private(*private)
        for fd in (*private, descriptors.arena, descriptors.board):
            os.set_inheritable(fd, False)
        self._in = descriptors.requests
        self._setup = setup
        self._arena = Mapping(descriptors.arena, 0)
        self._board = Board.row(descriptors.board, setup.worker)
        self._sender = Sender(descriptors.replies, self._arena)

    def run(self) -> None:
        """Start, work until told to end, end."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
        try:
            prepare(self._setup, self._sender.record)
            program = self._setup.program
            if isinstance(program, bytes):
                program = pickle.loads(program)
                limit_torch(self._setup.threads)  # it may have been imported just now
            work = program(self._setup.device)
        except BaseException as error:  # noqa: BLE001 - the parent raises whatever it is
            self._sender.failure(Failure.of(error, INIT))
            return
        self._sender.message(_wire.READY)
        try:
            self._serve(work)
            getattr(work, "close", lambda: None)()
        except BaseException as error:  # noqa: BLE001 - as above
            self._sender.failure(Failure.of(error, END))
            return
        self._sender.message(_wire.BYE)

    def _serve(self, work: Callable[[Any], Any]) -> None:
        """Work on chunks until the parent asks for an orderly end."""
        board, timed, batching = self._board, self._setup.timed, self._setup.batching
        sender, clock, head = self._sender, time.monotonic, _wire.REQUEST
        lease: Any
        while True:
            waiting = clock()
            header = _wire.read_exactly(self._in, head.size)
            if header is None:
                os._exit(1)  # the parent has gone without a word
            kind, n_items, n_buffers, length, seq, at, room, capacity, size = head.unpack(header)
            blob = _wire.read_exactly(self._in, length) if length and at < 0 else b""
            if kind == _wire.END:
                return
            began = clock()
            board[1] = 0
            board[2] = time.monotonic_ns()
            board[0] = seq
            self._arena.grow(size)
            try:
                items, lease = self._unpack(blob, n_buffers, length, at)
            except BaseException as error:  # noqa: BLE001 - the caller gets whatever it is
                results, failed, lease = [Failure.of(error, ITEM)] * n_items, True, None
            else:
                results, failed = run_chunk(work, items, board, timed=timed, batching=batching)
                del items
            board[2] = 0  # what follows is not the time of an item
            worked = clock()
            reply = Reply(seq, n_items, room, capacity, began, began - waiting, worked - began)
            if lease is not None:
                lease = weakref.ref(lease)  # results that are views of the inputs keep it alive
            sender.done(reply, results, failed, lease)
            results = []
            board[0] = IDLE

    def _unpack(self, blob: Any, n_buffers: int, length: int, at: int) -> tuple[list[Any], Any]:
        """Return the items, and the lease that their arrays and tensors keep alive."""
        if at >= 0:
            blob = self._arena.view[at : at + length]
        if not n_buffers:
            return unpack(blob, ()), None
        table = _wire.read_table(blob, n_buffers)
        start = table[0]
        lease = self._arena.lease(start, table[-2] + table[-1] - start)
        view = memoryview(lease).cast("B")
        buffers = [view[table[i] - start : table[i] - start + table[i + 1]] for i in range(0, len(table), 2)]
        return unpack(memoryview(blob)[16 * n_buffers :], buffers), lease
