"""The messages between a parent and its worker processes: a fixed header, then a blob.

The blob is the table of the large buffers in shared memory, then the pickle. It
follows the header through the pipe when it is small and lies in shared memory otherwise.
"""

import os
import struct
from collections.abc import Iterable
from typing import Any, NamedTuple

__all__ = [
    "BYE",
    "DONE",
    "END",
    "FAILED",
    "INLINE",
    "LOG",
    "READY",
    "RELEASE",
    "REPLY",
    "REQUEST",
    "START",
    "WORK",
    "Reply",
    "Request",
    "align",
    "encode_table",
    "read_exactly",
    "split_blob",
    "table_nbytes",
    "write_all",
]

REQUEST = struct.Struct("<BxxxIIxxxxqqqqqqq")
REPLY = struct.Struct("<BBxxIIxxxxqqqdddd")


class Request(NamedTuple):
    """The header of a message to a worker.

    Attributes:
        kind: ``START``, ``WORK`` or ``END``.
        n_items: How many items the chunk has.
        n_buffers: How many large buffers they refer to.
        blob_nbytes: The length of the blob.
        seq: The chunk's number.
        start: The place of its first item in the input.
        blob_at: Where the blob is in shared memory; -1 when it follows the header.
        room_at: Where results may be put in shared memory.
        room_nbytes: How many bytes may be put there.
        shared_nbytes: How large the shared memory is now.
    """

    kind: int
    n_items: int = 0
    n_buffers: int = 0
    blob_nbytes: int = 0
    seq: int = 0
    start: int = 0
    blob_at: int = -1
    room_at: int = 0
    room_nbytes: int = 0
    shared_nbytes: int = 0


class Reply(NamedTuple):
    """The header of a message from a worker.

    Attributes:
        kind: ``READY``, ``DONE``, ``RELEASE``, ``LOG``, ``FAILED`` or ``BYE``.
        flags: What is to be known of the results.
        n_items: How many items the chunk has.
        n_buffers: How many large buffers their results refer to.
        seq: The chunk's number.
        blob_nbytes: The length of the blob.
        blob_at: Where the blob is in shared memory; -1 when it follows the header.
        began: When the work on the chunk began, by the monotonic clock.
        waited_s: How long the worker had waited for it.
        worked_s: How long the work took.
        sent_s: How long sending the results before these took.
    """

    kind: int
    flags: int = 0
    n_items: int = 0
    n_buffers: int = 0
    seq: int = 0
    blob_nbytes: int = 0
    blob_at: int = -1
    began: float = 0.0
    waited_s: float = 0.0
    worked_s: float = 0.0
    sent_s: float = 0.0


INLINE = 16 << 10
"""Requests of up to so many bytes go through the pipe. Three of them fit into the 64 KiB that a
pipe holds, so a parent that has no more on their way to one worker never waits in a write."""

# From the parent: how to start, a chunk of items, the end.
START, WORK, END = 1, 2, 3
# From a worker: ready, results, inputs no longer used, a log record, the start or end failed, ended.
READY, DONE, RELEASE, LOG, FAILED, BYE = 11, 12, 13, 14, 15, 16


def align(offset: int) -> int:
    """Round up to where a buffer may begin: a cache line."""
    return (offset + 63) & ~63


def table_nbytes(n_buffers: int) -> int:
    """Return the length of the table of some buffers."""
    return 16 * n_buffers


def encode_table(places: Iterable[tuple[int, int]]) -> bytes:
    """Encode the offset and the length of each buffer."""
    flat = [number for place in places for number in place]
    return struct.pack(f"<{len(flat)}Q", *flat)


def split_blob(blob: Any, n_buffers: int) -> tuple[list[tuple[int, int]], memoryview]:
    """Take a blob apart into what :func:`encode_table` made for ``n_buffers`` buffers, and the pickle."""
    flat = struct.unpack_from(f"<{2 * n_buffers}Q", blob)
    return list(zip(flat[::2], flat[1::2], strict=True)), memoryview(blob)[table_nbytes(n_buffers) :]


def read_exactly(fd: int, nbytes: int) -> bytes | bytearray | None:
    """Read ``nbytes``, waiting for them; ``None`` at the end of the file."""
    data = os.read(fd, nbytes)
    if len(data) == nbytes:
        return data
    if not data:
        return None
    whole = bytearray(data)
    while len(whole) < nbytes:
        more = os.read(fd, nbytes - len(whole))
        if not more:
            return None
        whole += more
    return whole


def write_all(fd: int, data: Any) -> None:
    """Write all of ``data``, waiting for the reader."""
    written = os.write(fd, data)
    if written < len(data):
        rest = memoryview(data)[written:]
        while rest:
            rest = rest[os.write(fd, rest) :]
