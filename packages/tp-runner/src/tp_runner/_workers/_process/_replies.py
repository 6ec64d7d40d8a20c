"""The way back from a worker process: results, log records, failures."""

import collections
import pickle
import threading
import time
import weakref
from typing import Any

from tp_runner._workers._events import Timing
from tp_runner._workers._failure import Failure
from tp_runner._workers._pickle_errors import pack_what_can_be
from tp_runner._workers._process import _wire
from tp_runner._workers._process._pickling import pack, pack_by_value
from tp_runner._workers._process._shared_memory import MappedMemory

__all__ = ["FAILED", "HELD", "THROUGH_PIPE", "ReplyWriter"]

# Flags: some results are failures; the inputs are still in use; large buffers are in the blob too.
FAILED, HELD, THROUGH_PIPE = 1, 2, 4


class ReplyWriter:
    """Writes messages to the parent; safe to use from several threads."""

    def __init__(self, fd: int, memory: MappedMemory) -> None:
        self._fd = fd
        self._memory = memory
        self._lock = threading.RLock()
        self._kept: dict[int, weakref.ref[Any]] = {}
        self._released: collections.deque[int] = collections.deque()
        self._sent_s = 0.0

    def message(self, kind: int, blob: Any = b"", *, seq: int = 0) -> None:
        """Send something that is not about a chunk's results."""
        header = _wire.REPLY.pack(*_wire.Reply(kind, seq=seq, blob_nbytes=len(blob)))
        with self._lock:
            _wire.write_all(self._fd, b"".join((header, blob)))

    def failure(self, failure: Failure) -> None:
        """Send why the worker's start or end failed."""
        self.message(_wire.FAILED, pickle.dumps(failure, 5))

    def record(self, record: Any) -> None:
        """Send a log record, which must be picklable."""
        self.message(_wire.LOG, pickle.dumps(record, 5))

    def done(
        self,
        request: _wire.Request,
        timing: Timing,
        results: list[Any],
        lease: weakref.ref[Any] | None,
        *,
        failed: bool,
    ) -> None:
        """Send the results of a chunk.

        Args:
            request: What asked for them.
            timing: How long the work took.
            results: Its results; emptied, so that nothing here keeps them.
            lease: What views of the inputs keep alive.
            failed: Whether some of them are failures.
        """
        started = time.monotonic()
        while self._released:
            seq = self._released.popleft()
            self._kept.pop(seq, None)
            self.message(_wire.RELEASE, seq=seq)
        try:
            payload, buffers = pack(results)
        except Exception:  # noqa: BLE001 - whatever it is, a culprit is looked for
            payload, buffers, unpicklable = pack_what_can_be(results, pack_by_value)
            failed = failed or unpicklable
        results.clear()
        blob, length, at, fits = self._place(payload, buffers, request)
        n_buffers = len(buffers)
        del payload
        buffers.clear()
        flags = (FAILED if failed else 0) | (0 if fits else THROUGH_PIPE)
        if lease is not None and (held := lease()) is not None:
            flags |= HELD
            seq, released = request.seq, self._released
            self._kept[seq] = weakref.ref(held, lambda _: released.append(seq))
            del held
        reply = _wire.Reply(
            _wire.DONE,
            flags,
            request.n_items,
            n_buffers,
            request.seq,
            length,
            at,
            timing.began,
            timing.waited_s,
            timing.worked_s,
            self._sent_s,
        )
        header = _wire.REPLY.pack(*reply)
        with self._lock:
            _wire.write_all(self._fd, b"".join((header, *blob)))
        self._sent_s = time.monotonic() - started

    def _place(
        self, payload: bytes, buffers: list[memoryview], request: _wire.Request
    ) -> tuple[list[Any], int, int, bool]:
        """Copy results into their room in shared memory, or lay them out for the pipe.

        Returns:
            What goes through the pipe after the header, the length of the blob, its place in the
            shared memory or -1, whether the large buffers are there.
        """
        end = request.room_at + request.room_nbytes
        at, places = request.room_at, list[tuple[int, int]]()
        for buffer in buffers:
            places.append((at, buffer.nbytes))
            at = _wire.align(at + buffer.nbytes)
        table = _wire.encode_table(places)
        length = len(table) + len(payload)
        small = length <= _wire.INLINE
        if at + (0 if small else length) > end:
            # There is no room: all goes through the pipe, one buffer after the other.
            parts = [table, *(bytes(buffer) for buffer in buffers), payload]
            return parts, sum(len(part) for part in parts), -1, not buffers
        memory = self._memory.view
        for (place, nbytes), buffer in zip(places, buffers, strict=True):
            memory[place : place + nbytes] = buffer
        if small:
            return [table, payload], length, -1, True
        memory[at : at + len(table)] = table
        memory[at + len(table) : at + length] = payload
        return [], length, at, True
