"""A worker process: it reads chunks of items from one pipe, and writes results to another."""

import contextlib
import fcntl
import os
import pickle
import signal
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

from tp_runner._workers import _start, _wire
from tp_runner._workers._definitions import remember_program
from tp_runner._workers._failure import END, INIT, ITEM, Failure
from tp_runner._workers._heartbeats import FIRST_CANCELLED, WORDS, Heartbeats
from tp_runner._workers._item import WorkerTask, become_worker, set_current_task
from tp_runner._workers._pickling import dumps_exit_result
from tp_runner._workers._programs import StoredProgram, load_program
from tp_runner._workers._setup import Setup, keep_freed_memory, limit_torch, prepare_process, unpickling
from tp_runner._workers._shared_memory import MappedMemory
from tp_runner._workers._wire import ReplyWriter
from tp_runner._workers._work import ENDING, IDLE, ClassProgram, Timing, end_work, run_chunk


class Descriptors(NamedTuple):
    """The files that a worker shares with its parent."""

    requests: int
    replies: int
    life: int
    memory: int
    heartbeats: int


def main(requests: int, replies: int, life: int, memory: int, heartbeats: int, *passed: int) -> None:
    """Run a worker in a fresh process; its parent sends the setup first."""
    die_with_parent(life)
    header = _wire.read_exactly(requests, _wire.REQUEST.size)
    if header is None:
        return
    request = _wire.Request._make(_wire.REQUEST.unpack(header))
    blob: Any
    if request.blob_at >= 0:
        view = MappedMemory(memory, request.shared_nbytes).view
        blob = view[request.blob_at : request.blob_at + request.blob_nbytes]
    else:
        blob = _wire.read_exactly(requests, request.blob_nbytes)
    if blob is None:
        return
    descriptors = Descriptors(requests, replies, life, memory, heartbeats)
    _start.adopt_descriptors(passed)
    surroundings, pickled = pickle.loads(blob)
    surroundings.restore()
    setup = pickle.loads(pickled)
    WorkerProcess(descriptors, setup).run()


def die_with_parent(life: int) -> None:
    """Have the kernel kill this process when the other end of the pipe ``life`` closes.

    It needs neither a thread nor the interpreter, so it works in the middle of a long computation, too.
    Where the system cannot do it, a thread waits for the end of the pipe.
    """
    if hasattr(fcntl, "F_SETSIG"):
        fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(life, fcntl.F_SETSIG, signal.SIGKILL)
        flags = fcntl.fcntl(life, fcntl.F_GETFL)
        fcntl.fcntl(life, fcntl.F_SETFL, flags | os.O_ASYNC | os.O_NONBLOCK)
        # The parent may have ended before the signal was set up: then nothing sends it any more.
        with contextlib.suppress(BlockingIOError):  # the usual case: it is still open
            if not os.read(life, 1):
                os._exit(1)
        return
    threading.Thread(target=_wait_for_end, args=(life,), daemon=True).start()


def _wait_for_end(life: int) -> None:
    os.read(life, 1)
    os._exit(1)


class WorkerProcess:
    def __init__(self, descriptors: Descriptors, setup: Setup) -> None:
        # A process that the user's code forks or starts must not hide the worker's death from the parent
        # (test_programs_that_workers_start_do_not_hide_their_death).
        private = descriptors.requests, descriptors.replies, descriptors.life
        _start.make_private(*private)
        for fd in (*private, descriptors.memory, descriptors.heartbeats):
            os.set_inheritable(fd, False)
        self._in = descriptors.requests
        self._setup = setup
        self._memory = MappedMemory(descriptors.memory, 0)
        self._memory_fd = descriptors.memory
        self._heartbeat = Heartbeats.row(descriptors.heartbeats, setup.worker)
        self._replies = ReplyWriter(descriptors.replies, self._memory)

    def run(self) -> None:
        try:
            prepare_process(self._setup, self._replies.record)
            program = self._setup.program
            is_pickled = isinstance(program, bytes | StoredProgram)  # and not inherited by a fork
            with unpickling:
                if isinstance(program, bytes):
                    program = pickle.loads(program)
                elif isinstance(program, StoredProgram):
                    program = load_program(self._memory_fd, program)
            if is_pickled:
                remember_program()
                limit_torch(self._setup.threads)  # the program may have imported torch just now
            become_worker(self._setup.info)
            if isinstance(program, ClassProgram):
                program.is_own = True  # a forked worker has a copy of it, too
            work = program(self._setup.device)
        except BaseException as error:  # noqa: BLE001 - the parent raises whatever it is
            if isinstance(error, AttributeError) and "<module '__main__'" in str(error):
                error.add_note(
                    "It was pickled by its name alone, and your script does not run in workers: make it in "
                    "init= or producer_init, or move it into a module, which they import."
                )
            self._replies.failure(Failure.of(error, INIT))
            return
        self._replies.message(_wire.READY)
        try:
            self._serve(work)
            returned = end_work(work)
        except BaseException as error:  # noqa: BLE001 - as above
            self._replies.failure(Failure.of(error, END))
            return
        self._replies.message(_wire.BYE, dumps_exit_result(returned))

    def _serve(self, work: Callable[[Any], Any]) -> None:
        """Work on chunks until the parent asks for an orderly end."""
        heartbeat = self._heartbeat
        cancelled = heartbeat[FIRST_CANCELLED:WORDS]  # a view, to which the parent writes at any time
        task = WorkerTask(self._setup.settings, heartbeat, cancelled)
        set_current_task(task, of_process=True)
        # Local names: this loop is the cost of a chunk.
        replies = self._replies
        clock = time.monotonic
        head = _wire.REQUEST
        keeps_memory = False
        lease: Any
        while True:
            waiting = clock()
            header = _wire.read_exactly(self._in, head.size)
            if header is None:
                os._exit(1)  # the parent has gone without a word
            request = _wire.Request._make(head.unpack(header))
            if request.kind == _wire.END:
                heartbeat[0] = ENDING
                return
            blob: Any = b""
            if request.blob_nbytes and request.blob_at < 0:
                blob = _wire.read_exactly(self._in, request.blob_nbytes)
            began = clock()
            heartbeat[1] = 0
            heartbeat[2] = time.monotonic_ns()
            heartbeat[0] = request.seq  # last: the parent may read the row between two writes
            self._memory.grow(request.shared_nbytes)
            try:
                with unpickling:
                    items, lease = self._unpack(request, blob)
            except BaseException as error:  # noqa: BLE001 - the caller gets whatever it is
                results = [Failure.of(error, ITEM)] * request.n_items
                failed = True
                lease = None
            else:
                task.begin(request.start, request.run, request.attempt)
                results, failed = run_chunk(work, items, task)
                del items
            heartbeat[2] = 0  # what follows is not the time of an item
            worked = clock()
            timing = Timing(began, began - waiting, worked - began)
            if lease is not None:
                lease = weakref.ref(lease)  # results that are views of the inputs keep it alive
            replies.done(request, timing, results, lease, failed=failed)
            results = []
            heartbeat[0] = IDLE
            if not keeps_memory:  # after the first results, which need not wait for its import
                keeps_memory = True
                keep_freed_memory()

    def _unpack(self, request: _wire.Request, blob: Any) -> tuple[list[Any], Any]:
        """Return the items, and the lease that their arrays and tensors keep alive."""
        if request.blob_at >= 0:
            blob = self._memory.view[request.blob_at : request.blob_at + request.blob_nbytes]
        if not request.n_buffers:
            return _strip_definitions(pickle.loads(blob)), None
        table, payload = _wire.split_blob(blob, request.n_buffers)
        start, _ = table[0]
        last_at, last_nbytes = table[-1]
        lease = self._memory.lease(start, last_at + last_nbytes - start)
        view = memoryview(lease).cast("B")
        buffers = [view[at - start : at - start + nbytes] for at, nbytes in table]
        return _strip_definitions(pickle.loads(payload, buffers=buffers)), lease


def _strip_definitions(sent: Any) -> Any:
    """Return the list of items, which may follow the definitions that they need in a tuple."""
    if type(sent) is tuple:
        return sent[1]
    return sent
