"""A program in shared memory: every worker maps it, and has for itself only the pages that it writes to."""

import mmap
import pickle
from typing import Any, NamedTuple

from tp_runner._workers._process._shared_memory import SharedMemoryPool
from tp_runner._workers._process._wire import align

__all__ = ["StoredProgram", "load_program", "store_program"]


class StoredProgram(NamedTuple):
    """Where a program is.

    Attributes:
        offset: Where it begins in shared memory.
        nbytes: How long it is.
        places: Where the pickle and then each of its buffers begin in it, and their lengths.
    """

    offset: int
    nbytes: int
    places: tuple[tuple[int, int], ...]


def store_program(memory: SharedMemoryPool, payload: bytes, buffers: list[memoryview]) -> StoredProgram:
    """Put a pickle and its buffers into shared memory, where they stay."""
    places: list[tuple[int, int]] = []
    end = 0
    parts = [memoryview(payload), *(buffer.cast("B") for buffer in buffers)]
    for part in parts:
        places.append((end, part.nbytes))
        end = align(end + places[-1][1])
    block = memory.allocate(end)
    for (at, nbytes), part in zip(places, parts, strict=True):
        memory.view[block.offset + at : block.offset + at + nbytes] = part
    return StoredProgram(block.offset, end, tuple(places))


def load_program(fd: int, stored: StoredProgram) -> Any:
    """Unpickle a program; its arrays and tensors are views of this process's own copy-on-write map."""
    view = memoryview(mmap.mmap(fd, stored.nbytes, access=mmap.ACCESS_COPY, offset=stored.offset))
    payload, *buffers = (view[at : at + nbytes] for at, nbytes in stored.places)
    return pickle.loads(payload, buffers=buffers)
