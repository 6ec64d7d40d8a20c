"""The codec of items and results in shared memory: the parent's side, and a worker's side."""

import collections
import contextlib
import pickle
import select
import threading
import time
import weakref
from typing import Any

from tp_runner._workers._failure import RESULT, Failure
from tp_runner._workers._fleet import Chunk, Timing
from tp_runner._workers._pickling import USERS_ERRORS, pack_results
from tp_runner._workers._process import _wire
from tp_runner._workers._process._shared_memory import Block, MappedMemory, SharedMemoryPool
from tp_runner._workers._process._wire import (
    Definitions,
    SentDefinitions,
    key_in_worker,
    pack,
    pack_by_value,
    unpack,
)

# Flags: some results are failures; the inputs are still in use; large buffers are in the blob too.
FAILED, HELD, THROUGH_PIPE = 1, 2, 4

SPARE = 64 << 10
"""Spare bytes for results beyond their expected size."""


def _blob_sizes(payload: bytes, buffers: list[memoryview]) -> tuple[int, int]:
    """Return the length of the blob, and how many bytes of shared memory blob and buffers take."""
    length = _wire.table_nbytes(len(buffers)) + len(payload)
    room = sum(_wire.align(buffer.nbytes) for buffer in buffers)
    return length, room + (_wire.align(length) if length > _wire.INLINE else 0)


def _write_blob(
    memory: memoryview, at: int, payload: bytes, buffers: list[memoryview]
) -> tuple[list[Any], int]:
    """Copy buffers into shared memory, from ``at`` on, and a blob that is too long for the pipe behind them.

    Returns:
        The pieces for the pipe, and the place of the blob in shared memory, or -1.
    """
    places: list[tuple[int, int]] = []
    for buffer in buffers:
        memory[at : at + buffer.nbytes] = buffer
        places.append((at, buffer.nbytes))
        at = _wire.align(at + buffer.nbytes)
    table = _wire.encode_table(places)
    if len(table) + len(payload) <= _wire.INLINE:
        return [table, payload], -1
    memory[at : at + len(table)] = table
    memory[at + len(table) : at + len(table) + len(payload)] = payload
    return [], at


class ReplyWriter:
    """Writer of messages to the parent; threads may share it."""

    def __init__(self, fd: int, memory: MappedMemory) -> None:
        self._fd = fd
        self._memory = memory
        # Threads of the work may log while results are written, and messages must not mix in the pipe.
        # Reentrant: a finalizer or a signal handler of the writing thread may log, in the middle of a long
        # message; its record goes after that one (test_a_record_in_the_midst_of_a_result_follows_it).
        self._lock = threading.RLock()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._is_writing = self._is_cut = False
        self._kept: dict[int, weakref.ref[Any]] = {}
        self._released: collections.deque[int] = collections.deque()
        self._sent_s = 0.0
        self._key_of: Any = None  # set once results are of classes from the parent

    def message(self, kind: int, blob: Any = b"", *, seq: int = 0) -> None:
        """Send something that is not about a chunk's results."""
        header = _wire.REPLY.pack(*_wire.Reply(kind, seq=seq, blob_nbytes=len(blob)))
        self._send(b"".join((header, blob)))

    def _send(self, message: bytes) -> None:
        self._unsent.append(message)
        with self._lock:
            if self._is_writing or self._is_cut:
                return
            self._is_writing = True
            try:
                while self._unsent:
                    _wire.write_all(self._fd, message := self._unsent.popleft())
            except BaseException:
                # A signal handler has raised. What follows a part of a message would pass for its rest; up to
                # PIPE_BUF bytes are written in one piece.
                self._is_cut = len(message) > select.PIPE_BUF
                raise
            finally:
                self._is_writing = False

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
            request: The request of the chunk.
            timing: How long the work took.
            results: Its results; emptied, so that nothing here keeps them.
            lease: The lease that views of the inputs keep alive.
            failed: Whether some of them are failures.
        """
        started = time.monotonic()
        while self._released:
            seq = self._released.popleft()
            self._kept.pop(seq, None)
            self.message(_wire.RELEASE, seq=seq)
        try:
            payload, buffers = self._pack(results)
        except USERS_ERRORS:  # find the results that cannot be pickled
            payload, buffers, unpicklable = pack_results(results, pack_by_value)
            failed = failed or unpicklable
        results.clear()
        held = None if lease is None else lease()
        # As a rule nobody has the inputs any more: their memory, in this core's caches, takes the results.
        # Views that still exist, also in the results' buffers, keep the lease alive, and the inputs stay
        # (test_inputs_that_the_worker_keeps_stay_as_they_were).
        taken = request.inputs_nbytes if held is not None else 0
        length, room = _blob_sizes(payload, buffers)
        fits = taken + room <= request.block_nbytes
        if fits:
            blob, at = _write_blob(self._memory.view, request.block_at + taken, payload, buffers)
        else:  # through the pipe, one buffer after the other
            table = _wire.encode_table((0, buffer.nbytes) for buffer in buffers)
            blob, at = [table, *map(bytes, buffers), payload], -1
            length += sum(buffer.nbytes for buffer in buffers)
        n_buffers = len(buffers)
        del payload
        buffers.clear()
        flags = (FAILED if failed else 0) | (0 if fits else THROUGH_PIPE)
        if held is not None:
            flags |= HELD
            seq, released = request.seq, self._released
            # The callback runs in any thread, or in a collection: it only notes the chunk for the next reply.
            self._kept[seq] = weakref.ref(held, lambda _: released.append(seq))
            del held
        reply = _wire.Reply(
            _wire.DONE,
            flags,
            request.n_items,
            n_buffers,
            _wire.MAGIC,
            request.seq,
            length,
            at,
            timing.began,
            timing.waited_s,
            timing.worked_s,
            self._sent_s,
        )
        self._send(b"".join((_wire.REPLY.pack(*reply), *blob)))
        self._sent_s = time.monotonic() - started

    def _pack(self, results: list[Any]) -> tuple[bytes, list[memoryview]]:
        if self._key_of is None:
            with contextlib.suppress(*USERS_ERRORS):
                return pack(results)
        self._key_of = key_in_worker  # later results are like these, as a rule
        return pack(results, self._key_of)


class Codec:
    """The parent's codec: from chunks to requests, from replies to results.

    Args:
        memory: The shared memory, for large buffers and blobs.
        same_main: Whether a worker has this process's main module.
        lease_at_most: How many bytes of results may be views of shared memory; more are copied out.
    """

    def __init__(self, memory: SharedMemoryPool, *, same_main: bool, lease_at_most: int) -> None:
        self._memory = memory
        self._same_main = same_main
        self._lease_at_most = lease_at_most
        self._result_bytes = 0.0  # the most that a result took lately
        self._definitions = Definitions()
        self._tracks_definitions = False  # for what items refer to in the main module
        self.forget = self._definitions.forget

    def encode(self, worker: int, chunk: Chunk) -> tuple[Block, bytes]:
        """Put a chunk's items into shared memory; set its ``nbytes``.

        Returns:
            Their block, and the message to the worker.

        Raises:
            Exception: An item cannot be pickled; nothing was placed.
        """
        payload, buffers = self._pack(worker, chunk.items)
        length, inputs = _blob_sizes(payload, buffers)
        # Untouched memory costs nothing, so the first guess is generous.
        expected = self._result_bytes * len(chunk.items) * 1.25 if self._result_bytes else 2.0 * inputs
        block = self._memory.allocate(inputs + _wire.align(int(expected)) + SPARE)
        blob, at = _write_blob(self._memory.view, block.offset, payload, buffers)
        request = _wire.Request(
            _wire.WORK,
            n_items=len(chunk.items),
            n_buffers=len(buffers),
            attempt=chunk.sent - 1,
            blob_nbytes=length,
            seq=chunk.seq,
            start=chunk.start,
            blob_at=at,
            block_at=block.offset,
            block_nbytes=block.nbytes,
            inputs_nbytes=inputs,
            shared_nbytes=self._memory.nbytes,
            run=chunk.run,
        )
        chunk.nbytes = inputs if at >= 0 else inputs + length
        return block, b"".join((_wire.REQUEST.pack(*request), *blob))

    def _pack(self, worker: int, items: list[Any]) -> tuple[bytes, list[memoryview]]:
        try:
            if not self._tracks_definitions:
                payload, buffers = pack(items)
                if self._same_main or b"__main__" not in payload:
                    return payload, buffers
            found: dict[str, Any] = {}
            payload, buffers = pack(items, self._definitions.key_of(found))
            self._tracks_definitions = bool(found)  # later items are like these, as a rule
            if b"__main__" in payload:
                return pack_by_value(items)  # something else of __main__ than classes and functions
            if unsent := self._definitions.unsent(worker, found):
                payload, buffers = pack((SentDefinitions(unsent), items), self._definitions.key_of(found))
        except Exception:  # noqa: BLE001 - cloudpickle may still be able to, or says why not
            return pack_by_value(items)
        self._definitions.note_sent(worker, unsent, found)
        return payload, buffers

    def decode(self, block: Block, reply: _wire.Reply, blob: Any) -> tuple[list[Any], bool, int, bool]:
        """Unpickle results.

        Returns:
            The results, whether some are failures, how many bytes they took, and whether they are
            views of the block. Such a block is free again when the last view has died.
        """
        failed, leased, nbytes = bool(reply.flags & FAILED), False, reply.blob_nbytes
        buffers: list[Any] = []
        try:
            if reply.blob_at >= 0:
                blob = self._memory.view[reply.blob_at : reply.blob_at + nbytes]
            if reply.n_buffers:
                table, blob = _wire.split_blob(blob, reply.n_buffers)
                if reply.flags & THROUGH_PIPE:
                    for _, size in table:
                        buffers.append(bytearray(blob[:size]))
                        blob = blob[size:]
                else:
                    nbytes += sum(size for _, size in table)
                    leased = not reply.flags & HELD and self._memory.leased < self._lease_at_most
                    buffers = self._buffers(block, table, leased=leased)
            results = unpack(blob, buffers)
        except USERS_ERRORS as error:
            results, failed = [Failure.of(error, RESULT)] * reply.n_items, True
        self._result_bytes = max(nbytes / reply.n_items, 0.9 * self._result_bytes)
        return results, failed, nbytes, leased

    def _buffers(self, block: Block, table: list[tuple[int, int]], *, leased: bool) -> list[Any]:
        if not leased:
            memory = self._memory.view
            return [bytearray(memory[at : at + size]) for at, size in table]
        memory, base = self._memory.lease_block(block), block.offset
        return [memory[at - base : at - base + size] for at, size in table]
