"""The parent's side of workers that are processes: two pipes each, one loop, one piece of shared memory."""

import contextlib
import math
import os
import pickle
import select
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tp_core.output import get_logger

from tp_runner._options import Settings
from tp_runner._workers import _start, _wire
from tp_runner._workers._failure import END, INIT, Failure
from tp_runner._workers._fleet import (
    LONGEST_WAIT_S,
    Chunk,
    Died,
    Done,
    Event,
    Fleet,
    Ready,
    failure_of_death,
)
from tp_runner._workers._heartbeats import Heartbeats
from tp_runner._workers._item_errors import describe_exit
from tp_runner._workers._pickling import USERS_ERRORS, loads_exit_result
from tp_runner._workers._programs import pack_program
from tp_runner._workers._setup import Setup, handle_records
from tp_runner._workers._shared_memory import Block, SharedMemoryPool
from tp_runner._workers._start import (
    Process,
    bootstrap,
    check_start,
    fork,
    private_memory,
    spawn,
)
from tp_runner._workers._work import ENDING, IDLE, Timing
from tp_runner._workers._worker_process import Descriptors, WorkerProcess, die_with_parent, main
from tp_runner.errors import WorkerError


class WorkerHandle:
    """The parent's side of a worker process: its start, its pipes, its blocks of shared memory."""

    def __init__(
        self,
        worker: int,
        settings: Settings,
        setup: Setup | None,  # ``None`` if it is sent later
        *,
        passed: Sequence[int],
        memory: SharedMemoryPool,
        heartbeats: int,
    ) -> None:
        self.worker = worker
        # -- Its blocks of shared memory
        self.inflight: dict[int, Block] = {}  # of the chunks that it has been given, by their numbers
        self.held: dict[int, Block] = {}  # of finished chunks that keep inputs for the user's code
        # -- Its life
        self.ready = False  # it has started
        self.retiring = False  # it was asked to end while others keep working
        self.left = False  # it said goodbye before its pipe ended
        self.ended = False  # its pipe has come to its end
        self.is_garbled = False  # it has sent bytes that are no message
        self.returned: Any = None  # the value of its end
        self.failure: Failure | None = None  # why its start or end failed
        # -- The message of which a part has come, and how long it has to be at least
        self._partial = bytearray()
        self._wanted = 0
        self._passed = passed
        # A pipe for its life alone, not shared by workers: the signal of its end (F_SETSIG) is a property of
        # the open pipe, and the next worker would overwrite it (test_workers_end_with_their_parent).
        (theirs_in, self._requests), (self.replies, theirs_out), (life, self._life) = _start.open_pipes(3)
        descriptors = Descriptors(theirs_in, theirs_out, life, memory.fd, heartbeats)
        try:
            self.process = self._start(settings, setup, descriptors, memory)
        except BaseException:
            self.close()
            for block in self.held.values():
                memory.free(block)
            raise
        finally:
            # Or the end of the worker would not be the end of its pipes.
            _start.close_descriptors(theirs_in, theirs_out, life)
        os.set_blocking(self.replies, False)

    def _start(
        self, settings: Settings, setup: Setup | None, descriptors: Descriptors, memory: SharedMemoryPool
    ) -> Process:
        if setup is not None and settings.start_method == "fork":

            def child() -> None:
                die_with_parent(descriptors.life)
                WorkerProcess(descriptors, setup).run()

            with _start.inherit_descriptors(descriptors.requests, descriptors.replies, descriptors.life):
                return fork(child)
        if setup is not None:
            self.send_setup(setup, memory)
        fds = (*descriptors, *self._passed)
        if settings.start_method == "spawn":
            return spawn(bootstrap(main.__module__, main.__name__, *fds), fds, settings.env)
        from tp_runner._workers._fork_server import fork_by_server  # other starts need no sockets

        return fork_by_server(main, settings.preload, settings.env, fds)

    def send_setup(self, setup: Setup, memory: SharedMemoryPool) -> None:
        """Send the setup, without waiting: the pipe holds it, or the place of a long one."""
        data = setup.pickled()
        request = _wire.Request(_wire.START, blob_nbytes=len(data))
        if len(data) > _wire.INLINE:  # a pipe would block until the worker reads it, for any time
            block = self.held[_SETUP] = memory.allocate(len(data))
            memory.view[block.offset : block.offset + len(data)] = data
            request = request._replace(blob_at=block.offset, shared_nbytes=memory.nbytes)
            data = b""
        self.write(_wire.REQUEST.pack(*request) + data)

    def send_end(self) -> None:
        self.write(_wire.REQUEST.pack(*_wire.Request(_wire.END)))

    def write(self, data: bytes) -> None:
        """Write to the worker; the end of its other pipe reports one that has died."""
        try:
            _wire.write_all(self._requests, data)
        except BrokenPipeError:
            return

    def messages(self) -> Iterator[tuple[_wire.Reply, Any]]:
        """Yield the header and the blob of each message that has come; never wait."""
        head = _wire.REPLY
        try:
            data: Any = os.read(self.replies, 1 << 16)  # as much as a pipe holds on Linux
        except BlockingIOError:
            return
        if not data:
            self.ended = True
            return
        if self._partial:
            self._partial += data
            if len(self._partial) < self._wanted:
                return
            data = self._partial
            self._partial = bytearray()
        at = 0  # where the next message begins
        end = len(data)
        while at + head.size <= end:
            reply = _wire.Reply._make(head.unpack_from(data, at))
            if reply.magic != _wire.MAGIC or not 0 <= reply.blob_nbytes <= _wire.MOST_NBYTES:
                raise _wire.GarbledError
            after = at + head.size
            if reply.blob_at < 0:  # the blob follows
                after += reply.blob_nbytes
            if after > end:
                break
            yield reply, memoryview(data)[at + head.size : after]
            at = after
        if at < end:
            self._partial += memoryview(data)[at:]
            has_header = at + head.size <= end
            self._wanted = after - at if has_header else head.size

    def close(self) -> None:
        _start.close_descriptors(self._requests, self.replies, self._life)


_SETUP = 0  # among the held blocks, beside the numbers of chunks, which begin with 1

GARBLED = (
    "bytes came from it that are no message, and it was ended: its work, or a library, has written to a "
    "descriptor that is not its own"
)


def _unpickle_failure(blob: Any) -> Any:
    try:
        return pickle.loads(blob)
    except Exception as error:
        raise _wire.GarbledError from error


_log = get_logger("tp_runner")


class ProcessFleet(Fleet):
    """One process for each device.

    Nothing is shared that a dying worker could leave locked: each one has its own pipes, and the end
    of a pipe is the notice of a death.
    """

    def __init__(self, program: Any, devices: tuple[str, ...], settings: Settings) -> None:
        check_start(devices, settings)
        super().__init__(devices)
        self._settings = settings
        self._program: Any = None
        self._passed: list[int] = []
        self._memory = SharedMemoryPool()
        self._heartbeats = Heartbeats(len(devices))
        # Other threads, and signal handlers, end a wait in the poller by a byte in this pipe.
        self._wake = _start.open_pipe()
        for fd in self._wake:  # a full pipe must not block the writer, nor an empty one the reader
            os.set_blocking(fd, False)
        # Where there is no epoll, poll does; it counts in milliseconds.
        self._poller: Any
        if hasattr(select, "epoll"):
            self._poller = select.epoll()
            self._second = 1
        else:
            self._poller = select.poll()
            self._second = 1000
        self._poller.register(self._wake[0], select.POLLIN)
        self._handles: dict[int, WorkerHandle] = {}
        self._by_fd: dict[int, int] = {}
        self._codec = _wire.Codec(
            self._memory,
            same_main=settings.start_method == "fork",
            lease_at_most=settings.max_bytes // 2,
        )
        self._starting: dict[int, float] = {}  # workers that are not ready, and when they must be
        self._begun: list[int] = []  # workers whose starts have begun, before the first launch
        self._undelivered: list[Event] = []  # of workers that could not be started again
        self._closing = False
        self._owner = os.getpid()
        try:
            self._pack(program)
        except BaseException:
            self.close(timeout_s=0.0)
            raise

    def _pack(self, program: Any) -> None:
        """Pickle the program, while the processes that need not wait for it begin to start."""
        settings = self._settings
        if settings.start_method == "forkserver" and not settings.env:
            from tp_runner._workers._fork_server import begin_server  # other starts need no sockets

            begin_server(main)
        # A process is given descriptors at its start alone, and only multiprocessing's objects have any.
        if settings.start_method == "spawn" and "multiprocessing" not in sys.modules:
            self._begun = self._missing()
            for worker in self._begun:
                self._open(worker, None)
        packed = pack_program(program, self.devices, settings)
        self._settings = packed.settings
        self._passed = packed.descriptors
        self._program = packed.stored_in(self._memory)
        for worker in self._begun:
            self._handles[worker].send_setup(self._setup_of(worker), self._memory)

    # -- starting and ending --------------------------------------------------------------------

    def start(self, may_restart: Callable[[Died], bool]) -> list[Event]:
        events: list[Event] = []
        missing = [*self._missing(), *self._begun]
        self.launch()
        try:
            while not all(self._has_started(worker) for worker in missing):
                self.wait(None)
                for event in self.poll():
                    if event.worker not in missing:
                        events.append(event)
                    elif isinstance(event, Died):  # it may have been ready, and then waited for the others
                        if event.failure is not None or not may_restart(event):
                            raise self.error(event.worker, event.failure or failure_of_death(event))
                        self.revive(event.worker)
        except BaseException:
            self._kill_all()
            raise
        return events

    def _missing(self) -> list[int]:
        return [worker for worker in range(self.size) if worker not in self._handles]

    def _has_started(self, worker: int) -> bool:
        # A worker without a handle could not be started again; an event says why.
        return worker in self._handles and self._handles[worker].ready

    def launch(self) -> None:
        try:
            self._begun = []
            for worker in self._missing():
                self._launch(worker)
        except BaseException:
            self._kill_all()
            raise

    def reset(self) -> None:
        self._kill_all()

    def _launch(self, worker: int) -> None:
        try:
            self._open(worker, self._setup_of(worker))
        except ConnectionError as error:  # no traceback: it would be this process's
            raise self.error(worker, Failure(INIT, str(error))) from error

    def _setup_of(self, worker: int) -> Setup:
        return Setup(self._program, self.devices[worker], worker, self.size, self._settings)

    def _open(self, worker: int, setup: Setup | None) -> None:
        handle = WorkerHandle(
            worker,
            self._settings,
            setup,
            passed=self._passed,
            memory=self._memory,
            heartbeats=self._heartbeats.fd,
        )
        self._handles[worker] = handle
        self._starting[worker] = time.monotonic() + (self._settings.start_timeout_s or math.inf)
        self._by_fd[handle.replies] = worker
        self._poller.register(handle.replies, select.POLLIN)

    def revive(self, worker: int) -> None:
        self._heartbeats.clear(worker)
        try:
            self._launch(worker)
        except (WorkerError, OSError) as error:  # for all runs, and not only for the one that polls
            failure = Failure(INIT, str(error.__cause__ or error))
            self._undelivered.append(Died(worker, None, failure=failure, was_ready=False))
            self.wake()

    def alive(self, worker: int) -> bool:
        return worker in self._handles

    def ready(self, worker: int) -> bool:
        handle = self._handles.get(worker)
        return handle is not None and not handle.retiring

    def retire(self, worker: int) -> None:
        handle = self._handles[worker]
        if not handle.retiring:
            handle.retiring = True
            handle.send_end()

    def private_memory(self, worker: int) -> int | None:
        handle = self._handles.get(worker)
        if handle is None:
            return None
        return private_memory(handle.process.pid)

    def kill(self, worker: int) -> None:
        self._handles[worker].process.kill()

    def close(self, *, timeout_s: float) -> None:
        if self._is_closed() or self._owner != os.getpid():  # or this is a fork
            return
        failures: list[tuple[int, Failure]] = []
        self._closing = True
        deadline = time.monotonic() + timeout_s
        try:
            if timeout_s > 0:
                for handle in self._handles.values():
                    handle.send_end()
                while self._handles and (left_s := deadline - time.monotonic()) > 0:
                    self.wait(left_s)
                    for event in self.poll():
                        if isinstance(event, Died) and event.failure is not None:
                            failures.append((event.worker, event.failure))
                self.warn_not_ended(self._handles, timeout_s)
        finally:
            self._kill_all()
            self._memory.close()
            self._heartbeats.close()
            for fd in self._passed:
                os.close(fd)
            self._passed.clear()
            _start.close_descriptors(*self._wake)
            if hasattr(self._poller, "close"):
                self._poller.close()
        for worker, failure in failures:
            raise self.error(worker, failure)

    def _is_closed(self) -> bool:
        return self._memory.fd < 0

    def _kill_all(self) -> None:
        handles = list(self._handles.values())
        # All are killed before the first one is waited for, so that their ends overlap.
        for handle in handles:
            handle.process.kill()
        for handle in handles:
            handle.process.wait(5)
            self._remove_handle(handle)

    def _remove_handle(self, handle: WorkerHandle) -> None:
        self._poller.unregister(handle.replies)
        del self._by_fd[handle.replies], self._handles[handle.worker]
        self._starting.pop(handle.worker, None)
        self._codec.forget(handle.worker)
        if handle.ready:
            self._endings[handle.worker].append(handle.returned)
        handle.close()
        for block in (*handle.inflight.values(), *handle.held.values()):
            self._memory.free(block)

    # -- sending --------------------------------------------------------------------------------

    def send(self, worker: int, chunk: Chunk) -> None:
        block, message = self._codec.encode(worker, chunk)
        handle = self._handles[worker]
        handle.inflight[chunk.seq] = block
        handle.write(message)

    # -- receiving ------------------------------------------------------------------------------

    def cancel(self, worker: int, run: int) -> None:
        self._heartbeats.cancel(worker, run)

    def started(self, worker: int) -> tuple[int, float] | None:
        seq, _, began_ns = self._heartbeats.current(worker)
        if seq == IDLE or not began_ns:
            return None
        return seq, began_ns / 1e9

    def wake(self) -> None:
        try:
            os.write(self._wake[1], b"w")
        except BlockingIOError:  # full: the reader will wake up anyway
            return

    def wait(self, timeout_s: float | None) -> None:
        due = min(self._starting.values(), default=math.inf)
        if due < math.inf:
            left_s = max(0.0, due - time.monotonic())
            if timeout_s is None:
                timeout_s = left_s
            else:
                timeout_s = min(timeout_s, left_s)
        timeout = None  # in the poller's unit
        if timeout_s is not None:
            timeout = min(timeout_s, LONGEST_WAIT_S) * self._second
        try:
            ready = self._poller.poll(timeout)
        except (OSError, ValueError):
            if self._is_closed():  # by a signal handler, in the midst of this wait
                return
            raise
        for fd, _ in ready:
            # Not in poll(): another thread that polls would take the byte, and the waiting one would sleep on
            # (test_a_word_for_who_waits_is_not_lost_to_another_thread_that_polls).
            if fd == self._wake[0]:
                with contextlib.suppress(BlockingIOError):
                    os.read(fd, 4096)

    def poll(self) -> list[Event]:
        events = self._undelivered
        self._undelivered = []
        if self._is_closed():
            return events
        if self._starting:
            self._end_late_starts()
        for fd, _ in self._poller.poll(0):
            if fd != self._wake[0]:
                self._read_messages(self._handles[self._by_fd[fd]], events)
        return events

    def _read_messages(self, handle: WorkerHandle, events: list[Event]) -> None:
        try:
            for reply, blob in handle.messages():
                self._handle_message(handle, reply, blob, events)
        except _wire.GarbledError:
            # The begin of the next message is unknown now, so the worker is as good as dead.
            handle.is_garbled = True
            handle.process.kill()
        if handle.ended or handle.is_garbled:
            events.append(self._on_end(handle))

    def _handle_message(
        self, handle: WorkerHandle, reply: _wire.Reply, blob: Any, events: list[Event]
    ) -> None:
        if reply.kind == _wire.DONE and reply.seq in handle.inflight:
            events.append(self._finish_chunk(handle, reply, blob))
        elif reply.kind == _wire.RELEASE and reply.seq in handle.held:
            self._memory.free(handle.held.pop(reply.seq))
        elif reply.kind == _wire.LOG:
            try:
                record = pickle.loads(blob)
            except USERS_ERRORS as error:  # what the work has added to it; no reason to lose the worker
                _log.warning("a log record of worker %d cannot be read here: %s", handle.worker, error)
            else:
                handle_records([record])
        elif reply.kind == _wire.READY:
            handle.ready = True
            if _SETUP in handle.held:
                self._memory.free(handle.held.pop(_SETUP))
            self._starting.pop(handle.worker, None)
            events.append(Ready(handle.worker))
        elif reply.kind == _wire.FAILED:
            handle.failure = _unpickle_failure(blob)
        elif reply.kind == _wire.BYE:
            handle.left = True
            handle.returned = loads_exit_result(blob)
        else:
            raise _wire.GarbledError

    def _end_late_starts(self) -> None:
        now = time.monotonic()
        for worker, deadline in self._starting.items():
            if now >= deadline:
                # Never late twice; the end of its pipe reports its death, as for any other.
                self._starting[worker] = math.inf
                limit = self._settings.start_timeout_s
                handle = self._handles[worker]
                handle.failure = Failure(INIT, f"it was not ready after start_timeout_s={limit}")
                handle.process.kill()

    def _on_end(self, handle: WorkerHandle) -> Died:
        exitcode = handle.process.wait(5)
        if exitcode is None:  # it closed its pipe and lives on
            handle.process.kill()
            exitcode = handle.process.wait(5)
        seq, place, began_ns = self._heartbeats.current(handle.worker)
        current = (seq, place) if seq in handle.inflight else None
        self._remove_handle(handle)
        self._heartbeats.clear(handle.worker)
        if exitcode == _start.UNKNOWN_EXIT:
            exitcode = None
        if handle.is_garbled:
            how = GARBLED
        else:
            how = describe_exit(exitcode)
        failure = handle.failure
        # Where workers are started again, an idle one had nothing to lose but its own end.
        lost_its_end = seq == ENDING or not self._settings.max_restarts
        if failure is None and self._closing and not handle.left and lost_its_end:
            failure = Failure(END, f"its process ended before it was done: {how}")
        return Died(
            handle.worker,
            exitcode,
            current,
            failure,
            began_ns / 1e9,
            is_retired=handle.retiring and handle.left,
            how=how,
            was_ready=handle.ready,
        )

    def _finish_chunk(self, handle: WorkerHandle, reply: _wire.Reply, blob: Any) -> Done:
        block = handle.inflight.pop(reply.seq)
        results, failed, nbytes, leased = self._codec.decode(block, reply, blob)
        if failed:  # perhaps to unpickle definitions: send them again with the next chunk
            self._codec.forget(handle.worker)
        if reply.flags & _wire.HELD:
            handle.held[reply.seq] = block
        elif not leased:
            self._memory.free(block)
        timing = Timing(reply.began, reply.waited_s, reply.worked_s, reply.sent_s)
        return Done(handle.worker, reply.seq, results, failed, timing, nbytes)
