"""One worker process as its parent sees it: a handle, two pipes, what it has been given."""

import os
from collections.abc import Iterator
from typing import Any

from tp_runner import _at_fork, _wire
from tp_runner._arena import Extent
from tp_runner._failure import Failure
from tp_runner._forkserver import fork_by_server
from tp_runner._launch import Handle, bootstrap, fork, spawn
from tp_runner._settings import Settings
from tp_runner._worker import Descriptors, Setup, WorkerProcess, die_with_parent, main

__all__ = ["Link"]


class Link:
    """Starts a worker process and talks to it.

    Attributes:
        worker: The worker's number.
        handle: Its process.
        replies: The descriptor that its messages come from.
        inflight: The extents of the chunks that it has been given, by their numbers.
        held: The extents of finished chunks whose inputs the user's code has kept.
        ready: Whether it has started.
        ended: Whether its pipe has come to its end.
        left: Whether it said goodbye before that.
        failure: Why its start or end failed.
    """

    def __init__(
        self,
        program: Any,
        device: str,
        worker: int,
        settings: Settings,
        *,
        arena: int,
        board: int,
    ) -> None:
        self.worker = worker
        self.inflight: dict[int, Extent] = {}
        self.held: dict[int, Extent] = {}
        self.ready = False
        self.ended = False
        self.left = False
        self.failure: Failure | None = None
        self._partial = bytearray()
        self._wanted = 0
        self._setup = b""
        theirs_in, self._requests = _at_fork.pipe()
        self.replies, theirs_out = _at_fork.pipe()
        # One for each worker: whom the kernel tells of its end is a property of the pipe's end.
        life, self._life = _at_fork.pipe()
        descriptors = Descriptors(theirs_in, theirs_out, life, arena, board)
        try:
            self.handle = self._start(program, device, settings, descriptors)
        except BaseException:
            self.close()
            raise
        finally:
            _at_fork.close(theirs_in, theirs_out, life)
        os.set_blocking(self.replies, False)

    def _start(self, program: Any, device: str, settings: Settings, descriptors: Descriptors) -> Handle:
        setup = Setup(
            program,
            device,
            self.worker,
            settings.threads,
            settings.timeout_s is not None,
            settings.batching,
            settings.log_level,
        )
        if settings.start_method == "fork":

            def child() -> None:
                die_with_parent(descriptors.life)
                WorkerProcess(descriptors, setup).run()

            with _at_fork.inherited(descriptors.requests, descriptors.replies, descriptors.life):
                return fork(child)
        self._setup = setup.pickled()
        fds = (
            descriptors.requests,
            descriptors.replies,
            descriptors.life,
            descriptors.arena,
            descriptors.board,
        )
        if settings.start_method == "spawn":
            return spawn(bootstrap(main.__module__, main.__name__, *fds), fds)
        return fork_by_server(settings.preload, fds)

    def send_setup(self) -> None:
        """Send what a fresh process must know first; it may be large, so all are started before."""
        if self._setup:
            header = _wire.REQUEST.pack(_wire.START, 0, 0, len(self._setup), 0, -1, 0, 0, 0)
            self.write(header)
            self.write(self._setup)
            self._setup = b""

    def send_end(self) -> None:
        """Ask the worker to end when it has done what it was given."""
        self.write(_wire.REQUEST.pack(_wire.END, 0, 0, 0, 0, -1, 0, 0, 0))

    def write(self, data: bytes) -> None:
        """Write to the worker; one that has died is noticed by the end of its other pipe."""
        try:
            _wire.write_all(self._requests, data)
        except BrokenPipeError:
            return

    def messages(self) -> Iterator[tuple[tuple[Any, ...], Any]]:
        """Yield the header and the blob of each message that has come; never wait."""
        head = _wire.REPLY
        try:
            data: Any = os.read(self.replies, 1 << 18)
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
        at, end = 0, len(data)
        while at + head.size <= end:
            header = head.unpack_from(data, at)
            after = at + head.size + (header[5] if header[6] < 0 else 0)
            if after > end:
                break
            yield header, memoryview(data)[at + head.size : after]
            at = after
        if at < end:
            self._partial += memoryview(data)[at:]
            self._wanted = after - at if at + head.size <= end else head.size

    def close(self) -> None:
        """Close the pipes."""
        _at_fork.close(self._requests, self.replies, self._life)
