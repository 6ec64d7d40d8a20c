"""The messages between a parent and its worker processes: a fixed header, then a blob.

The blob is the table of the extents of the large buffers in the shared arena, then the pickle. It
follows the header through the pipe when it is small and lies in the arena otherwise.
"""

import os
import struct
from collections.abc import Sequence
from typing import Any

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
    "align",
    "extent_table",
    "read_exactly",
    "read_table",
    "write_all",
]

REQUEST = struct.Struct("<BxxxIIIqqqqq")
"""kind, items, buffers, blob length, sequence number, blob offset or -1, offset and capacity of
the room for results, size of the arena."""

REPLY = struct.Struct("<BBxxIIqqqdddd")
"""kind, flags, items, buffers, sequence number, blob length, blob offset or -1, when the work began,
seconds waited for it, worked, and spent on sending the previous one."""

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


def extent_table(extents: Sequence[int]) -> bytes:
    """Encode offsets and lengths, alternating."""
    return struct.pack(f"<{len(extents)}Q", *extents)


def read_table(blob: Any, n_buffers: int) -> tuple[int, ...]:
    """Decode what :func:`extent_table` made for ``n_buffers`` buffers."""
    return struct.unpack_from(f"<{2 * n_buffers}Q", blob)


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
