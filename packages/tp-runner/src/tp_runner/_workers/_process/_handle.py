"""One worker process as its parent sees it: a handle, two pipes, what it has been given."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

from tp_runner._options import Settings
from tp_runner._workers._failure import Failure
from tp_runner._workers._process import _inheritance, _wire
from tp_runner._workers._process._shared_memory import Block
from tp_runner._workers._process._spawn import Process, bootstrap, fork, spawn
from tp_runner._workers._process._worker import Descriptors, WorkerProcess, die_with_parent, main
from tp_runner._workers._setup import Setup


class WorkerHandle:
    """Starts a worker process and talks to it.

    Attributes:
        worker: The worker's number.
        process: Its process.
        replies: The descriptor that its messages come from.
        inflight: The blocks of the chunks that it has been given, by their numbers.
        held: The blocks of finished chunks whose inputs the user's code has kept.
        ready: Whether it has started.
        ended: Whether its pipe has come to its end.
        retiring: Whether it was told to end while others go on.
        left: Whether it said goodbye before that.
        returned: What its end returned.
        failure: Why its start or end failed.
        is_garbled: Whether bytes have come from it that are no message.
    """

    def __init__(
        self,
        program: Any,
        device: str,
        worker: int,
        settings: Settings,
        *,
        count: int,
        passed: Sequence[int],
        memory: int,
        heartbeats: int,
    ) -> None:
        self.worker = worker
        self.inflight: dict[int, Block] = {}
        self.held: dict[int, Block] = {}
        self.ready = False
        self.ended = False
        self.left = False
        self.retiring = False
        self.returned: Any = None
        self.failure: Failure | None = None
        self.is_garbled = False
        self._partial = bytearray()
        self._wanted = 0
        self._setup = b""
        self._passed = passed
        # One for its life, too: whom the kernel tells of an end is a property of the pipe's end.
        (theirs_in, self._requests), (self.replies, theirs_out), (life, self._life) = _inheritance.pipes(3)
        descriptors = Descriptors(theirs_in, theirs_out, life, memory, heartbeats)
        try:
            self.process = self._start(program, device, settings, descriptors, count)
        except BaseException:
            self.close()
            raise
        finally:
            _inheritance.close(theirs_in, theirs_out, life)
        os.set_blocking(self.replies, False)

    def _start(
        self, program: Any, device: str, settings: Settings, descriptors: Descriptors, count: int
    ) -> Process:
        setup = Setup(program, device, self.worker, count, settings)
        if settings.start_method == "fork":

            def child() -> None:
                die_with_parent(descriptors.life)
                WorkerProcess(descriptors, setup).run()

            with _inheritance.inherited(descriptors.requests, descriptors.replies, descriptors.life):
                return fork(child)
        self._setup = setup.pickled()
        fds = (
            descriptors.requests,
            descriptors.replies,
            descriptors.life,
            descriptors.memory,
            descriptors.heartbeats,
            *self._passed,
        )
        if settings.start_method == "spawn":
            return spawn(bootstrap(main.__module__, main.__name__, *fds), fds, settings.env)
        from tp_runner._workers._process._forkserver import fork_by_server  # the others need not wait for it

        return fork_by_server(settings.preload, settings.env, fds)

    def send_setup(self) -> None:
        """Send what a fresh process must know first; it may be large, so all are started before."""
        if self._setup:
            request = _wire.Request(_wire.START, blob_nbytes=len(self._setup))
            self.write(_wire.REQUEST.pack(*request))
            self.write(self._setup)
            self._setup = b""

    def send_end(self) -> None:
        """Ask the worker to end when it has done what it was given."""
        self.write(_wire.REQUEST.pack(*_wire.Request(_wire.END)))

    def write(self, data: bytes) -> None:
        """Write to the worker; one that has died is noticed by the end of its other pipe."""
        try:
            _wire.write_all(self._requests, data)
        except BrokenPipeError:
            return

    def messages(self) -> Iterator[tuple[_wire.Reply, Any]]:
        """Yield the header and the blob of each message that has come; never wait.

        Raises:
            GarbledError: What has come is no message.
        """
        head = _wire.REPLY
        try:
            data: Any = os.read(self.replies, 1 << 16)  # what a pipe holds
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
            reply = _wire.Reply._make(head.unpack_from(data, at))
            if reply.magic != _wire.MAGIC or not 0 <= reply.blob_nbytes <= _wire.MOST_NBYTES:
                raise _wire.GarbledError
            after = at + head.size + (reply.blob_nbytes if reply.blob_at < 0 else 0)
            if after > end:
                break
            yield reply, memoryview(data)[at + head.size : after]
            at = after
        if at < end:
            self._partial += memoryview(data)[at:]
            self._wanted = after - at if at + head.size <= end else head.size

    def close(self) -> None:
        """Close the pipes."""
        _inheritance.close(self._requests, self.replies, self._life)
