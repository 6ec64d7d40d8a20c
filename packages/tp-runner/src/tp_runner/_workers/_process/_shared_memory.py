"""Shared memory that the parent owns and every worker maps: reused, unnamed, one descriptor.

A large program lies there too: a worker has private copies only of the pages that it writes to.
"""

import collections
import ctypes
import dataclasses
import mmap
import os
import pickle
import sys
import weakref
from collections.abc import MutableSequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from tp_core.errors import ConfigError

from tp_runner._options import Settings
from tp_runner._workers._pickling import LARGE, dump_program
from tp_runner._workers._process._start import MOST_PASSED, collect_descriptors
from tp_runner._workers._work import IDLE

SMALLEST = 64 << 10
INITIAL = 64 << 20  # untouched pages of the file cost nothing


@dataclass(slots=True, frozen=True)
class Block:
    """A range of the shared memory: ``nbytes`` from ``offset`` on."""

    offset: int
    nbytes: int


class MappedMemory:
    """A process's map of the file of a shared memory; it grows with the file."""

    def __init__(self, fd: int, nbytes: int) -> None:
        self._fd = fd
        self._nbytes = 0
        self.grow(nbytes)

    def grow(self, nbytes: int) -> None:
        """Map at least ``nbytes``. Views of the old map stay valid: they keep it alive."""
        if nbytes > self._nbytes:
            self._map = mmap.mmap(self._fd, nbytes)
            self.view = memoryview(self._map)
            self._nbytes = nbytes

    def release(self) -> None:
        """Drop the map, which ends with the last view of it."""
        self.view = memoryview(b"")
        del self._map

    def lease(self, offset: int, nbytes: int) -> Any:
        """Return an object that owns this range; views made of it keep it alive."""
        return (ctypes.c_char * nbytes).from_buffer(self._map, offset)


class SharedMemoryPool(MappedMemory):
    """The parent's side: a pool of blocks, in eight sizes between two powers of two.

    Free blocks are in a stack for each size. So the pool hands out those first that were used last: their
    pages are touched and warm. Memory that was never touched costs nothing.
    """

    def __init__(self) -> None:
        self.fd = unnamed_file()
        os.ftruncate(self.fd, INITIAL)
        self.nbytes = INITIAL
        self.leased = 0
        self._end = 0
        self._free: dict[int, list[Block]] = collections.defaultdict(list)
        self._leases: dict[int, tuple[weakref.ref[Any], Block]] = {}
        self._returned: collections.deque[int] = collections.deque()
        super().__init__(self.fd, INITIAL)

    def allocate(self, nbytes: int) -> Block:
        """Return a block of at least ``nbytes``; the file grows when it must."""
        self._collect()
        size = wanted = _round_size(nbytes)
        while size <= 2 * wanted:
            if free := self._free.get(size):
                return free.pop()
            size = _round_size(size + 1)
        block = Block(self._end, wanted)
        self._end += wanted
        if self._end > self.nbytes:
            self.nbytes = max(2 * self.nbytes, 1 << (self._end - 1).bit_length())
            os.ftruncate(self.fd, self.nbytes)
            self.grow(self.nbytes)
        return block

    def free(self, block: Block) -> None:
        """Take a block back."""
        self._free[block.nbytes].append(block)

    def lease_block(self, block: Block) -> memoryview:
        """Return a view of a block, which is free again when the last view of it has died."""
        lease = self.lease(block.offset, block.nbytes)
        # The callback runs wherever the last view dies, in any thread or a collection. It takes no lock: it
        # only notes the block, and the next allocation frees it.
        key, returned = block.offset, self._returned
        self._leases[key] = (weakref.ref(lease, lambda _: returned.append(key)), block)
        self.leased += block.nbytes
        return memoryview(lease).cast("B")

    def _collect(self) -> None:
        while self._returned:
            _, block = self._leases.pop(self._returned.popleft())
            self.leased -= block.nbytes
            self.free(block)

    def close(self) -> None:
        """Close the file; memory goes back when the last view has died."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self.release()
        self._free.clear()


def _round_size(nbytes: int) -> int:
    """Round up to a block's size: a multiple of an eighth of the power of two below it."""
    step = max(SMALLEST, 1 << max(0, (nbytes - 1).bit_length() - 3))
    return -(-nbytes // step) * step


def align(offset: int) -> int:
    """Round up to where a buffer may begin: a cache line."""
    return (offset + 63) & ~63


def unnamed_file() -> int:
    """Return a descriptor of memory without a name, which nobody need remove after a crash."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create("tp-runner", os.MFD_CLOEXEC)
    import tempfile  # where there is no memfd

    fd, path = tempfile.mkstemp(prefix="tp-runner-")
    os.unlink(path)  # noqa: PTH108 - it has no name from here on
    return fd


WORDS = 8  # a cache line: number of the chunk, place in it, start time; then cancelled runs
FIRST_CANCELLED = 3
_ROW = WORDS * 8


class Heartbeat(NamedTuple):
    """The state of a worker."""

    seq: int  # the number of the chunk at work, ``IDLE`` or ``ENDING``
    place: int  # the place of the item at work in that chunk
    began_ns: int  # when the work on it began, by the monotonic clock; 0 between items


class Heartbeats:
    """One row of words for each worker, which the parent reads at any time.

    It outlives a worker's death, and says which item killed it.
    """

    def __init__(self, n_workers: int) -> None:
        self.fd = unnamed_file()
        os.ftruncate(self.fd, n_workers * _ROW)
        self._rows = [self.row(self.fd, worker) for worker in range(n_workers)]
        self._n_cancelled = [0] * n_workers

    @staticmethod
    def row(fd: int, worker: int) -> MutableSequence[int]:
        """Map the row of one worker."""
        whole = memoryview(mmap.mmap(fd, (worker + 1) * _ROW)).cast("q")
        return whole[worker * WORDS :]  # type: ignore[return-value]  # a memoryview of integers

    def current(self, worker: int) -> Heartbeat:
        """Return the state of a worker, dead or alive."""
        return Heartbeat._make(self._rows[worker][:FIRST_CANCELLED])

    def cancel(self, worker: int, run: int) -> None:
        """Mark a run as cancelled for a worker.

        There is room for more runs than a worker can have chunks of at a time.
        """
        row, at = self._rows[worker], FIRST_CANCELLED + self._n_cancelled[worker] % (WORDS - FIRST_CANCELLED)
        if run not in row[FIRST_CANCELLED:WORDS]:
            row[at] = run
            self._n_cancelled[worker] += 1

    def clear(self, worker: int) -> None:
        """Mark a dead worker as idle, for the one in its place."""
        self._rows[worker][0] = IDLE

    def close(self) -> None:
        """Close the file."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
            self._rows.clear()


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
    """Pickle a program, unless workers are forked and have it; find modules to import once.

    Raises:
        ConfigError: It refers to more descriptors than a fork server passes.
        NotPicklableError: Something that it refers to cannot travel.
    """
    descriptors: list[int] = []
    buffers: list[memoryview] = []
    if settings.start_method == "fork":
        return PackedProgram(program, buffers, descriptors, settings)
    try:
        with collect_descriptors(descriptors):
            payload = dump_program(program, buffers)
        if settings.start_method == "forkserver" and len(descriptors) > MOST_PASSED:
            msg = (
                f"the work refers to {len(descriptors)} pipes, queues or shared values of multiprocessing, "
                f"and a fork server passes {MOST_PASSED} at most; start_method='spawn' passes any number"
            )
            raise ConfigError(msg)
    except BaseException:
        for fd in descriptors:
            os.close(fd)
        raise
    found: tuple[str, ...] = ()
    if settings.seed is not None:
        found = ("numpy", "torch")
    elif "torch" in sys.modules or b"torch" in payload or set(devices) != {"cpu"}:
        found = ("torch",)
    settings = dataclasses.replace(settings, preload=(*settings.preload, *found))
    return PackedProgram(payload, buffers, descriptors, settings)


class StoredProgram(NamedTuple):
    """The place of a program in shared memory."""

    offset: int  # its begin in shared memory
    nbytes: int  # how long it is
    # the begin and the length of the pickle, then of each of its buffers, from the offset on
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
