"""Putting items into shared memory for their journey, and taking results out."""

from typing import Any

from tp_runner._workers._events import Chunk
from tp_runner._workers._failure import RESULT, Failure
from tp_runner._workers._process import _wire
from tp_runner._workers._process._pickling import pack, pack_by_value, unpack
from tp_runner._workers._process._replies import FAILED, HELD, THROUGH_PIPE
from tp_runner._workers._process._shared_memory import Block, SharedMemoryPool

__all__ = ["Codec"]

SPARE = 64 << 10
"""Bytes of room for results beyond what they are expected to take."""


class Codec:
    """Makes requests of chunks and results of replies.

    Args:
        memory: Where what is large lies.
        same_main: Whether a worker has this process's main module.
        lease_at_most: How many bytes of results may be views of shared memory; more are copied out.
    """

    def __init__(self, memory: SharedMemoryPool, *, same_main: bool, lease_at_most: int) -> None:
        self._memory = memory
        self._same_main = same_main
        self._lease_at_most = lease_at_most
        self._result_bytes = 0.0  # the most that a result took lately

    def encode(self, chunk: Chunk) -> tuple[Block, bytes]:
        """Put a chunk's items into shared memory; set its ``nbytes``.

        Returns:
            Where they are, and the message to the worker.

        Raises:
            Exception: An item cannot be pickled; nothing was placed.
        """
        payload, buffers = self._pack(chunk.items)
        inputs = sum(_wire.align(buffer.nbytes) for buffer in buffers)
        length = _wire.table_nbytes(len(buffers)) + len(payload)
        small = length <= _wire.INLINE
        nbytes = inputs + length
        if not small:
            inputs += _wire.align(length)
        # Memory that nobody touches costs nothing, so the first guess is a generous one.
        expected = self._result_bytes * len(chunk.items) * 1.25 if self._result_bytes else 2.0 * inputs
        block = self._memory.allocate(inputs + _wire.align(int(expected)) + SPARE)
        memory, at = self._memory.view, block.offset
        table: list[tuple[int, int]] = []
        for buffer in buffers:
            memory[at : at + buffer.nbytes] = buffer
            table.append((at, buffer.nbytes))
            at = _wire.align(at + buffer.nbytes)
        head = _wire.encode_table(table)
        if not small:
            memory[at : at + len(head)] = head
            memory[at + len(head) : at + length] = payload
        room = block.offset + inputs
        request = _wire.Request(
            _wire.WORK,
            n_items=len(chunk.items),
            n_buffers=len(buffers),
            blob_nbytes=length,
            seq=chunk.seq,
            start=chunk.start,
            blob_at=-1 if small else at,
            room_at=room,
            room_nbytes=block.offset + block.nbytes - room,
            shared_nbytes=self._memory.nbytes,
        )
        header = _wire.REQUEST.pack(*request)
        chunk.nbytes = nbytes
        return block, b"".join((header, head, payload)) if small else header

    def _pack(self, items: list[Any]) -> tuple[bytes, list[memoryview]]:
        try:
            payload, buffers = pack(items)
        except Exception:  # noqa: BLE001 - cloudpickle may still be able to, or says why not
            return pack_by_value(items)
        if not self._same_main and b"__main__" in payload:
            return pack_by_value(items)
        return payload, buffers

    def decode(self, block: Block, reply: _wire.Reply, blob: Any) -> tuple[list[Any], bool, int, bool]:
        """Take results out.

        Returns:
            The results, whether some are failures, how many bytes they took, and whether they are
            views of the block, which then comes back when the last of them has died.
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
        except Exception as error:  # noqa: BLE001 - a user's __setstate__ may do anything
            results, failed = [Failure.of(error, RESULT)] * reply.n_items, True
        self._result_bytes = max(nbytes / reply.n_items, 0.9 * self._result_bytes)
        return results, failed, nbytes, leased

    def _buffers(self, block: Block, table: list[tuple[int, int]], *, leased: bool) -> list[Any]:
        if not leased:
            memory = self._memory.view
            return [bytearray(memory[at : at + size]) for at, size in table]
        memory, base = self._memory.lease_block(block), block.offset
        return [memory[at - base : at - base + size] for at, size in table]
