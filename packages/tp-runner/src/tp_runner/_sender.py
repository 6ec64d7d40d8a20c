"""The way back from a worker process: results, log records, failures."""

import collections
import contextlib
import pickle
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tp_runner import _wire
from tp_runner._arena import Mapping
from tp_runner._culprit import why_not_picklable
from tp_runner._failure import RESULT, Failure
from tp_runner._packing import pack, pack_by_value

__all__ = ["FAILED", "HELD", "THROUGH_PIPE", "Reply", "Sender", "pack_what_can_be"]

# Flags: some results are failures; the inputs are still in use; large buffers are in the blob too.
FAILED, HELD, THROUGH_PIPE = 1, 2, 4


@dataclass(frozen=True, slots=True)
class Reply:
    """What a reply says of its chunk, beside the results.

    Attributes:
        seq: The chunk's sequence number.
        n_items: How many items it has.
        room: Where results may lie in the arena.
        capacity: How many bytes may lie there.
        began: When the work on it began.
        waited_s: How long the worker had waited for it.
        worked_s: How long it took.
    """

    seq: int
    n_items: int
    room: int
    capacity: int
    began: float
    waited_s: float
    worked_s: float


class Sender:
    """Writes messages to the parent; safe to use from several threads."""

    def __init__(self, fd: int, arena: Mapping) -> None:
        self._fd = fd
        self._arena = arena
        self._lock = threading.RLock()
        self._kept: dict[int, weakref.ref[Any]] = {}
        self._released: collections.deque[int] = collections.deque()
        self._sent_s = 0.0

    def message(self, kind: int, blob: Any = b"", *, seq: int = 0) -> None:
        """Send something that is not about a chunk's results."""
        header = _wire.REPLY.pack(kind, 0, 0, 0, seq, len(blob), -1, 0.0, 0.0, 0.0, 0.0)
        with self._lock:
            _wire.write_all(self._fd, b"".join((header, blob)))

    def failure(self, failure: Failure) -> None:
        """Send why the worker's start or end failed."""
        self.message(_wire.FAILED, pickle.dumps(failure, 5))

    def record(self, record: Any) -> None:
        """Send a log record, which must be picklable."""
        self.message(_wire.LOG, pickle.dumps(record, 5))

    def done(self, reply: Reply, results: list[Any], failed: bool, lease: weakref.ref[Any] | None) -> None:
        """Send the results of a chunk.

        Args:
            reply: The chunk.
            results: Its results; emptied, so that nothing here keeps them.
            failed: Whether some of them are failures.
            lease: What views of the inputs keep alive.
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
        blob, length, at, fits = self._place(payload, buffers, reply)
        n_buffers = len(buffers)
        del payload
        buffers.clear()
        flags = (FAILED if failed else 0) | (0 if fits else THROUGH_PIPE)
        if lease is not None and (held := lease()) is not None:
            flags |= HELD
            seq, released = reply.seq, self._released
            self._kept[seq] = weakref.ref(held, lambda _: released.append(seq))
            del held
        header = _wire.REPLY.pack(
            _wire.DONE,
            flags,
            reply.n_items,
            n_buffers,
            reply.seq,
            length,
            at,
            reply.began,
            reply.waited_s,
            reply.worked_s,
            self._sent_s,
        )
        with self._lock:
            _wire.write_all(self._fd, b"".join((header, *blob)))
        self._sent_s = time.monotonic() - started

    def _place(
        self, payload: bytes, buffers: list[memoryview], reply: Reply
    ) -> tuple[list[Any], int, int, bool]:
        """Copy results into their room in the arena, or lay them out for the pipe.

        Returns:
            What goes through the pipe after the header, the length of the blob, its place in the
            arena or -1, whether the large buffers are in the arena.
        """
        end = reply.room + reply.capacity
        at, extents = reply.room, list[int]()
        for buffer in buffers:
            extents += (at, buffer.nbytes)
            at = _wire.align(at + buffer.nbytes)
        table = _wire.extent_table(extents)
        length = len(table) + len(payload)
        small = length <= _wire.INLINE
        if at + (0 if small else length) > end:
            # There is no room: all goes through the pipe, one buffer after the other.
            parts = [table, *(bytes(buffer) for buffer in buffers), payload]
            return parts, sum(len(part) for part in parts), -1, not buffers
        memory = self._arena.view
        for place, buffer in zip(extents[::2], buffers, strict=True):
            memory[place : place + buffer.nbytes] = buffer
        if small:
            return [table, payload], length, -1, True
        memory[at : at + len(table)] = table
        memory[at + len(table) : at + length] = payload
        return [], length, at, True


def pack_what_can_be(
    results: list[Any], packer: Callable[[Any], tuple[bytes, list[memoryview]]]
) -> tuple[bytes, list[memoryview], bool]:
    """Pack results; put a failure in the place of those that cannot be packed.

    Returns:
        The pickle, the large buffers, whether there are such failures.
    """
    with contextlib.suppress(Exception):  # each one is tried by itself below
        return *packer(results), False
    for place, result in enumerate(results):
        try:
            packer(result)
        except Exception as error:  # noqa: BLE001 - a user's __reduce__ may do anything
            results[place] = Failure.of(error, RESULT)
            results[place].summary = why_not_picklable(result, "result", error)
    return *packer(results), True
