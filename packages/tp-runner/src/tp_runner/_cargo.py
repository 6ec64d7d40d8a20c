"""Loading items into the shared arena for their journey, and unloading results."""

from typing import Any

from tp_runner import _wire
from tp_runner._arena import Arena, Extent
from tp_runner._failure import RESULT, Failure
from tp_runner._packing import pack, pack_by_value, unpack
from tp_runner._sender import FAILED, HELD, THROUGH_PIPE

__all__ = ["Cargo"]

SPARE = 64 << 10
"""Bytes of room for results beyond what they are expected to take."""


class Cargo:
    """Makes requests of items and results of replies.

    Args:
        arena: Where what is large lies.
        same_main: Whether a worker has this process's main module.
        lend_at_most: How many bytes of results may be views of the arena; more are copied out.
    """

    def __init__(self, arena: Arena, *, same_main: bool, lend_at_most: int) -> None:
        self._arena = arena
        self._same_main = same_main
        self._lend_at_most = lend_at_most
        self._result_bytes = 0.0  # the most that a result took lately

    def load(self, seq: int, items: list[Any]) -> tuple[Extent, bytes, int]:
        """Place items in the arena.

        Returns:
            Where they are, the message to the worker, how many bytes they take.

        Raises:
            Exception: An item cannot be pickled; nothing was placed.
        """
        payload, buffers = self._pack(items)
        inputs = sum(_wire.align(buffer.nbytes) for buffer in buffers)
        length = 16 * len(buffers) + len(payload)
        small = length <= _wire.INLINE
        nbytes = inputs + length
        if not small:
            inputs += _wire.align(length)
        # Memory that nobody touches costs nothing, so the first guess is a generous one.
        expected = self._result_bytes * len(items) * 1.25 if self._result_bytes else 2.0 * inputs
        extent = self._arena.allocate(inputs + _wire.align(int(expected)) + SPARE)
        memory, at = self._arena.view, extent.offset
        table: list[int] = []
        for buffer in buffers:
            memory[at : at + buffer.nbytes] = buffer
            table += (at, buffer.nbytes)
            at = _wire.align(at + buffer.nbytes)
        blob = b"".join((_wire.extent_table(table), payload))
        if not small:
            memory[at : at + length] = blob
        room = extent.offset + inputs
        header = _wire.REQUEST.pack(
            _wire.WORK,
            len(items),
            len(buffers),
            length,
            seq,
            -1 if small else at,
            room,
            extent.offset + extent.nbytes - room,
            self._arena.nbytes,
        )
        return extent, header + blob if small else header, nbytes

    def _pack(self, items: list[Any]) -> tuple[bytes, list[memoryview]]:
        try:
            payload, buffers = pack(items)
        except Exception:  # noqa: BLE001 - cloudpickle may still be able to, or says why not
            return pack_by_value(items)
        if not self._same_main and b"__main__" in payload:
            return pack_by_value(items)
        return payload, buffers

    def unload(self, extent: Extent, header: tuple[Any, ...], blob: Any) -> tuple[list[Any], bool, int, bool]:
        """Take results out.

        Returns:
            The results, whether some are failures, how many bytes they took, and whether they are
            views of the extent, which then comes back by itself.
        """
        _, flags, n_items, n_buffers, _, nbytes, at = header[:7]
        failed, lent = bool(flags & FAILED), False
        buffers: list[Any] = []
        try:
            if at >= 0:
                blob = self._arena.view[at : at + nbytes]
            if n_buffers:
                table = _wire.read_table(blob, n_buffers)
                blob = memoryview(blob)[16 * n_buffers :]
                if flags & THROUGH_PIPE:
                    for size in table[1::2]:
                        buffers.append(bytearray(blob[:size]))
                        blob = blob[size:]
                else:
                    nbytes += sum(table[1::2])
                    lent = not flags & HELD and self._arena.leased < self._lend_at_most
                    buffers = self._buffers(extent, table, lent=lent)
            results = unpack(blob, buffers)
        except Exception as error:  # noqa: BLE001 - a user's __setstate__ may do anything
            results, failed = [Failure.of(error, RESULT)] * n_items, True
        self._result_bytes = max(nbytes / n_items, 0.9 * self._result_bytes)
        return results, failed, nbytes, lent

    def _buffers(self, extent: Extent, table: tuple[int, ...], *, lent: bool) -> list[Any]:
        pairs = zip(table[::2], table[1::2], strict=True)
        if not lent:
            memory = self._arena.view
            return [bytearray(memory[at : at + size]) for at, size in pairs]
        memory, base = self._arena.lend(extent), extent.offset
        return [memory[at - base : at - base + size] for at, size in pairs]
