"""Workers that are processes: two pipes each, one loop, one piece of shared memory."""

import dataclasses
import os
import pickle
import select
import time
from typing import Any

from tp_runner import _at_fork, _wire
from tp_runner._arena import Arena
from tp_runner._board import Board
from tp_runner._errors import ItemError
from tp_runner._failure import INIT, RESULT, Failure
from tp_runner._fleet import Chunk, Died, Done, Event, Fleet, Ready, Timing
from tp_runner._link import Link
from tp_runner._packing import pack, pack_by_value, unpack
from tp_runner._program import dump_program
from tp_runner._records import handle_record
from tp_runner._report import failure_to_error
from tp_runner._sender import FAILED, HELD, THROUGH_PIPE
from tp_runner._settings import Settings
from tp_runner._work import IDLE

__all__ = ["ProcessFleet"]


class ProcessFleet(Fleet):
    """One process for each device.

    Nothing is shared that a dying worker could leave locked: each one has its own pipes, and the end
    of a pipe is the notice of a death.
    """

    def __init__(self, program: Any, devices: tuple[str, ...], settings: Settings) -> None:
        self.devices = devices
        self._settings = settings
        self._program = program
        if settings.start_method != "fork":
            self._program = dump_program(program)
            if b"torch" in self._program or any(device != "cpu" for device in devices):
                # Imported once by the fork server instead of once by each worker.
                self._settings = dataclasses.replace(settings, preload=("torch",))
        self._arena = Arena()
        self._board = Board(len(devices))
        self._wake = os.pipe()
        for fd in self._wake:
            os.set_blocking(fd, False)
        _at_fork.private(*self._wake)
        # Where there is no epoll, poll does; it counts in milliseconds.
        self._poller: Any = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._second = 1 if hasattr(select, "epoll") else 1000
        self._poller.register(self._wake[0], select.POLLIN)
        self._links: dict[int, Link] = {}
        self._by_fd: dict[int, int] = {}
        self._result_bytes = 0.0  # the most that a result took lately
        self._owner = os.getpid()

    # -- starting and ending --------------------------------------------------------------------

    def start(self) -> list[Event]:
        others: list[Event] = []
        missing = [worker for worker in range(self.size) if worker not in self._links]
        try:
            for worker in missing:
                self._launch(worker)
            for worker in missing:
                self._links[worker].send_setup()
            while any(not self._links[worker].ready for worker in missing):
                for event in self.poll(None):
                    if isinstance(event, Died) and event.worker in missing:
                        raise self._start_error(event)
                    if event.worker not in missing:
                        others.append(event)
        except BaseException:
            self._kill_all()
            raise
        return others

    def reset(self) -> None:
        self._kill_all()

    def _start_error(self, died: Died) -> ItemError:
        failure = died.failure
        if failure is None:
            ended = f"its process ended with exit status {died.exitcode} before it was ready"
            failure = Failure(INIT, ended)
        return failure_to_error(failure, device=self.devices[died.worker], worker=died.worker)

    def _launch(self, worker: int) -> None:
        link = Link(
            self._program,
            self.devices[worker],
            worker,
            self._settings,
            arena=self._arena.fd,
            board=self._board.fd,
        )
        self._links[worker] = link
        self._by_fd[link.replies] = worker
        self._poller.register(link.replies, select.POLLIN)

    def revive(self, worker: int) -> None:
        self._board.clear(worker)
        self._launch(worker)
        self._links[worker].send_setup()

    def alive(self, worker: int) -> bool:
        return worker in self._links

    def kill(self, worker: int) -> None:
        self._links[worker].handle.kill()

    def close(self, *, timeout_s: float) -> None:
        if self._arena.fd < 0 or self._owner != os.getpid():
            return
        failures: list[tuple[int, Failure]] = []
        deadline = time.monotonic() + timeout_s
        try:
            if timeout_s > 0:
                for link in self._links.values():
                    link.send_end()
                while self._links and (left_s := deadline - time.monotonic()) > 0:
                    for event in self.poll(left_s):
                        if isinstance(event, Died) and event.failure is not None:
                            failures.append((event.worker, event.failure))
        finally:
            self._kill_all()
            self._arena.close()
            self._board.close()
            _at_fork.forget(*self._wake)
            for fd in self._wake:
                os.close(fd)
            if hasattr(self._poller, "close"):
                self._poller.close()
        for worker, failure in failures:
            raise failure_to_error(failure, device=self.devices[worker], worker=worker)

    def _kill_all(self) -> None:
        links = list(self._links.values())
        for link in links:
            link.handle.kill()
        for link in links:
            link.handle.wait(5)
            self._drop(link)

    def _drop(self, link: Link) -> None:
        self._poller.unregister(link.replies)
        del self._by_fd[link.replies], self._links[link.worker]
        link.close()
        for extent in (*link.inflight.values(), *link.held.values()):
            self._arena.free(extent)

    # -- sending --------------------------------------------------------------------------------

    def send(self, worker: int, chunk: Chunk) -> None:
        payload, buffers = self._pack(chunk.items)
        n_items = len(chunk.items)
        inputs = sum(_wire.align(buffer.nbytes) for buffer in buffers)
        length = 16 * len(buffers) + len(payload)
        small = length <= _wire.INLINE
        if not small:
            inputs += _wire.align(length)
        expected = self._result_bytes * n_items * 1.25 if self._result_bytes else 2.0 * inputs
        room = _wire.align(int(expected)) + (64 << 10)
        extent = self._arena.allocate(inputs + room)
        memory, at = self._arena.view, extent.offset
        table: list[int] = []
        for buffer in buffers:
            memory[at : at + buffer.nbytes] = buffer
            table += (at, buffer.nbytes)
            at = _wire.align(at + buffer.nbytes)
        blob = b"".join((_wire.extent_table(table), payload))
        blob_at = -1
        if not small:
            memory[at : at + length] = blob
            blob_at = at
            blob = b""
        results_at = extent.offset + inputs
        chunk.nbytes = inputs + (length if small else 0)
        link = self._links[worker]
        link.inflight[chunk.seq] = extent
        header = _wire.REQUEST.pack(
            _wire.WORK,
            n_items,
            len(buffers),
            length,
            chunk.seq,
            blob_at,
            results_at,
            extent.offset + extent.nbytes - results_at,
            self._arena.nbytes,
        )
        link.write(header + blob)

    def _pack(self, items: list[Any]) -> tuple[bytes, list[memoryview]]:
        try:
            payload, buffers = pack(items)
        except Exception:  # noqa: BLE001 - cloudpickle may still be able to, or says why not
            return pack_by_value(items)
        if self._settings.start_method != "fork" and b"__main__" in payload:
            # A worker that was not forked has another main module.
            return pack_by_value(items)
        return payload, buffers

    # -- receiving ------------------------------------------------------------------------------

    def started(self, worker: int) -> tuple[int, float] | None:
        seq, _, began_ns = self._board.current(worker)
        return None if seq == IDLE or not began_ns else (seq, began_ns / 1e9)

    def wake(self) -> None:
        try:
            os.write(self._wake[1], b"w")
        except BlockingIOError:  # it is full: the reader will wake up anyway
            return

    def poll(self, timeout_s: float | None) -> list[Event]:
        events: list[Event] = []
        wait = None if timeout_s is None else timeout_s * self._second
        for fd, _ in self._poller.poll(wait):
            if fd == self._wake[0]:
                os.read(fd, 4096)
            else:
                self._receive(self._links[self._by_fd[fd]], events)
        return events

    def _receive(self, link: Link, events: list[Event]) -> None:
        for header, blob in link.messages():
            kind, seq = header[0], header[4]
            if kind == _wire.DONE:
                events.append(self._done(link, header, blob))
            elif kind == _wire.RELEASE:
                self._arena.free(link.held.pop(seq))
            elif kind == _wire.LOG:
                handle_record(pickle.loads(blob))
            elif kind == _wire.READY:
                link.ready = True
                events.append(Ready(link.worker))
            elif kind == _wire.FAILED:
                link.failure = pickle.loads(blob)
            elif kind == _wire.BYE:
                link.left = True
        if link.ended:
            events.append(self._bury(link))

    def _bury(self, link: Link) -> Died:
        exitcode = link.handle.wait(5)
        if exitcode is None:  # it closed its pipe and lives on
            link.handle.kill()
            exitcode = link.handle.wait(5)
        seq, place, began_ns = self._board.current(link.worker)
        current = (seq, place) if seq in link.inflight else None
        self._drop(link)
        self._board.clear(link.worker)
        return Died(link.worker, exitcode, current, link.failure, began_ns / 1e9)

    def _done(self, link: Link, header: tuple[Any, ...], blob: Any) -> Done:
        _, flags, n_items, n_buffers, seq, length, at, began, waited_s, worked_s, sent_s = header
        extent = link.inflight.pop(seq)
        held = bool(flags & HELD)
        lent = False
        nbytes = length
        failed = bool(flags & FAILED)
        try:
            if at >= 0:
                blob = self._arena.view[at : at + length]
            buffers: list[Any] = []
            if n_buffers:
                table = _wire.read_table(blob, n_buffers)
                blob = memoryview(blob)[16 * n_buffers :]
                if flags & THROUGH_PIPE:
                    for size in table[1::2]:
                        buffers.append(bytearray(blob[:size]))
                        blob = blob[size:]
                else:
                    nbytes += sum(table[1::2])
                    lent = not held and self._arena.leased < self._settings.max_bytes // 2
                    memory = self._arena.lend(extent) if lent else self._arena.view
                    base = extent.offset if lent else 0
                    for i in range(0, len(table), 2):
                        part = memory[table[i] - base : table[i] - base + table[i + 1]]
                        buffers.append(part if lent else bytearray(part))
                    del memory
            results = unpack(blob, buffers)
        except Exception as error:  # noqa: BLE001 - a user's __setstate__ may do anything
            results, failed = [Failure.of(error, RESULT)] * n_items, True
        if held:
            link.held[seq] = extent
        elif not lent:
            self._arena.free(extent)
        per_item = nbytes / n_items
        self._result_bytes = max(per_item, 0.9 * self._result_bytes)
        return Done(
            link.worker,
            seq,
            results,
            failed,
            Timing(began, waited_s, worked_s, sent_s),
            nbytes,
        )
