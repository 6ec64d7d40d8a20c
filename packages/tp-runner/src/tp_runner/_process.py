"""Workers that are processes: two pipes each, one loop, one piece of shared memory."""

import dataclasses
import os
import pickle
import select
import sys
import time
from typing import Any

from tp_runner import _at_fork, _wire
from tp_runner._arena import Arena
from tp_runner._board import Board
from tp_runner._cargo import Cargo
from tp_runner._errors import ItemError
from tp_runner._failure import END, INIT, Failure
from tp_runner._fleet import Chunk, Died, Done, Event, Fleet, Ready, Timing
from tp_runner._link import Link
from tp_runner._program import dump_program
from tp_runner._records import handle_record
from tp_runner._report import describe_exit, failure_to_error
from tp_runner._sender import HELD
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
            if "torch" in sys.modules or b"torch" in self._program or set(devices) != {"cpu"}:
                # Imported once by the fork server instead of once by each worker.
                self._settings = dataclasses.replace(settings, preload=("torch",))
        self._arena = Arena()
        self._board = Board(len(devices))
        self._wake = _at_fork.pipe()
        for fd in self._wake:
            os.set_blocking(fd, False)
        # Where there is no epoll, poll does; it counts in milliseconds.
        self._poller: Any = select.epoll() if hasattr(select, "epoll") else select.poll()
        self._second = 1 if hasattr(select, "epoll") else 1000
        self._poller.register(self._wake[0], select.POLLIN)
        self._links: dict[int, Link] = {}
        self._by_fd: dict[int, int] = {}
        self._cargo = Cargo(
            self._arena,
            same_main=settings.start_method == "fork",
            lend_at_most=settings.max_bytes // 2,
        )
        self._closing = False
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
        self._closing = True
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
            _at_fork.close(*self._wake)
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
        extent, message, chunk.nbytes = self._cargo.load(chunk.seq, chunk.items)
        link = self._links[worker]
        link.inflight[chunk.seq] = extent
        link.write(message)

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
        failure = link.failure
        if self._closing and failure is None and not link.left:
            failure = Failure(END, f"its process ended before it was done: {describe_exit(exitcode)}")
        return Died(link.worker, exitcode, current, failure, began_ns / 1e9)

    def _done(self, link: Link, header: tuple[Any, ...], blob: Any) -> Done:
        seq = header[4]
        extent = link.inflight.pop(seq)
        results, failed, nbytes, lent = self._cargo.unload(extent, header, blob)
        if header[1] & HELD:
            link.held[seq] = extent
        elif not lent:
            self._arena.free(extent)
        return Done(link.worker, seq, results, failed, Timing(*header[7:]), nbytes)
