"""A program in shared memory: every worker maps it, and has for itself only the pages that it writes to."""

import dataclasses
import mmap
import pickle
import sys
from typing import Any, NamedTuple

from tp_runner._options import Settings
from tp_runner._workers._pickling import LARGE, dump_program
from tp_runner._workers._process._inheritance import collect_descriptors
from tp_runner._workers._process._shared_memory import SharedMemoryPool
from tp_runner._workers._process._wire import align

__all__ = ["PackedProgram", "StoredProgram", "load_program", "pack_program"]


class PackedProgram(NamedTuple):
    """A program that is ready to travel.

    Attributes:
        program: Its pickle, or for a fork itself.
        buffers: The large arrays and tensors in it, in order.
        descriptors: The files that workers must be started with.
        settings: The runner's, with what is imported once for all workers.
    """

    program: Any
    buffers: list[memoryview]
    descriptors: list[int]
    settings: Settings

    def stored_in(self, memory: SharedMemoryPool) -> Any:
        """Return what a worker is sent: where it is in shared memory, if it is large."""
        if self.buffers or (isinstance(self.program, bytes) and len(self.program) > LARGE):
            return _store_program(memory, self.program, self.buffers)
        return self.program


def pack_program(program: Any, devices: tuple[str, ...], settings: Settings) -> PackedProgram:
    """Pickle a program, unless workers are forked and have it; see what is worth importing once.

    Raises:
        NotPicklableError: Something that it refers to cannot travel.
    """
    descriptors: list[int] = []
    buffers: list[memoryview] = []
    if settings.start_method == "fork":
        return PackedProgram(program, buffers, descriptors, settings)
    with collect_descriptors(descriptors):
        payload = dump_program(program, buffers)
    found: tuple[str, ...] = ()
    if settings.seed is not None:
        found = ("numpy", "torch")
    elif "torch" in sys.modules or b"torch" in payload or set(devices) != {"cpu"}:
        found = ("torch",)
    settings = dataclasses.replace(settings, preload=(*settings.preload, *found))
    return PackedProgram(payload, buffers, descriptors, settings)


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


def _store_program(memory: SharedMemoryPool, payload: bytes, buffers: list[memoryview]) -> StoredProgram:
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
