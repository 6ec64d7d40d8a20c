"""The program of a fleet: pickled once for all workers, and in shared memory if it is large.

A worker has private copies only of the pages that it writes to.
"""

import mmap
import os
import pickle
import sys
from typing import Any, NamedTuple

from tp_core.errors import ConfigError

from tp_runner._options import Settings
from tp_runner._workers._pickling import LARGE, dump_program
from tp_runner._workers._shared_memory import SharedMemoryPool, align
from tp_runner._workers._start import collect_descriptors


class PackedProgram(NamedTuple):
    """A program, pickled for its workers."""

    program: Any  # its pickle, or for a fork itself
    buffers: list[memoryview]  # the large arrays and tensors in it, in order
    descriptors: list[int]  # the files that workers must be started with
    settings: Settings  # the runner's, with the modules that are imported once for all workers

    def stored_in(self, memory: SharedMemoryPool) -> Any:
        """Return the message to a worker: the program, or its place in shared memory, if it is large."""
        if self.buffers or (isinstance(self.program, bytes) and len(self.program) > LARGE):
            return _store_program(memory, self.program, self.buffers)
        return self.program


def pack_program(program: Any, devices: tuple[str, ...], settings: Settings) -> PackedProgram:
    """Pickle a program, unless workers are forked and have it; find modules to import once."""
    descriptors: list[int] = []
    buffers: list[memoryview] = []
    if settings.start_method == "fork":
        return PackedProgram(program, buffers, descriptors, settings)
    try:
        with collect_descriptors(descriptors):
            payload = dump_program(program, buffers)
        if settings.start_method == "forkserver":
            from tp_runner._workers._fork_server import MOST_PASSED  # other starts need no sockets

            if len(descriptors) > MOST_PASSED:
                msg = (
                    f"the work refers to {len(descriptors)} pipes, queues or shared values of "
                    f"multiprocessing, and a fork server passes {MOST_PASSED} at most; start_method='spawn' "
                    "passes any number"
                )
                raise ConfigError(msg)
    except BaseException:
        for fd in descriptors:
            os.close(fd)
        raise
    # Slow imports that every worker will need: the fork server makes them once.
    preload = list(settings.preload)
    if settings.seed is not None:
        preload += ["numpy", "torch"]
    elif "torch" in sys.modules or b"torch" in payload or set(devices) != {"cpu"}:
        preload += ["torch"]
    settings = settings._replace(preload=tuple(preload))
    return PackedProgram(payload, buffers, descriptors, settings)


class StoredProgram(NamedTuple):
    """The place of a program in shared memory."""

    offset: int  # its begin in shared memory
    nbytes: int  # how long it is
    # the begin and the length of the pickle, then of each of its buffers, from the offset on
    places: tuple[tuple[int, int], ...]


def _store_program(memory: SharedMemoryPool, payload: bytes, buffers: list[memoryview]) -> StoredProgram:
    """Put a pickle and its buffers into shared memory, where they stay."""
    parts = [memoryview(payload), *(buffer.cast("B") for buffer in buffers)]
    places: list[tuple[int, int]] = []
    end = 0
    for part in parts:
        places.append((end, part.nbytes))
        end = align(end + part.nbytes)
    block = memory.allocate(end)
    for (at, nbytes), part in zip(places, parts, strict=True):
        memory.view[block.offset + at : block.offset + at + nbytes] = part
    return StoredProgram(block.offset, end, tuple(places))


def load_program(fd: int, stored: StoredProgram) -> Any:
    """Unpickle a program; its arrays and tensors are views of this process's own copy-on-write map."""
    view = memoryview(mmap.mmap(fd, stored.nbytes, access=mmap.ACCESS_COPY, offset=stored.offset))
    payload, *buffers = (view[at : at + nbytes] for at, nbytes in stored.places)
    return pickle.loads(payload, buffers=buffers)
