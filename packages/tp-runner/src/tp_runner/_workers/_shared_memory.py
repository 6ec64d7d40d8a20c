"""Shared memory that the parent owns and every worker maps: reused, unnamed, one descriptor."""

import collections
import fcntl
import mmap
import os
import weakref
from typing import Any, NamedTuple

SMALLEST = 64 << 10
INITIAL = 64 << 20  # untouched pages of the file cost nothing
CACHE_LINE = 64


class Block(NamedTuple):
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
        import ctypes  # as in _start: no start of workers waits for it

        return (ctypes.c_char * nbytes).from_buffer(self._map, offset)


class SharedMemoryPool(MappedMemory):
    """The parent's side: a pool of blocks, in eight sizes between two powers of two.

    One LIFO free list for each size, so that recently used blocks, with warm pages, are reused first. Memory
    that was never touched costs nothing.
    """

    def __init__(self) -> None:
        # The file, and how much of it was ever handed out.
        self.fd = unnamed_file()
        os.ftruncate(self.fd, INITIAL)
        self.nbytes = INITIAL
        self._end = 0
        self._free: dict[int, list[Block]] = collections.defaultdict(list)  # by size
        # Blocks that the consumer has views of, by their offsets, and those of which the last view has died.
        self.leased = 0  # bytes
        self._leases: dict[int, tuple[weakref.ref[Any], Block]] = {}
        self._returned: collections.deque[int] = collections.deque()
        super().__init__(self.fd, INITIAL)

    def allocate(self, nbytes: int) -> Block:
        """Return a block of at least ``nbytes``; the file grows when it must."""
        self._collect()
        wanted = _round_size(nbytes)
        size = wanted
        while size <= 2 * wanted:  # a larger one, but not one that wastes more than it holds
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
        key = block.offset
        returned = self._returned
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
    """Round up to where a buffer may begin."""
    return -(-offset // CACHE_LINE) * CACHE_LINE


def unnamed_file() -> int:
    """Return a descriptor of memory without a name, which nobody need remove after a crash."""
    if hasattr(os, "memfd_create"):
        return above_standard(os.memfd_create("tp-runner", os.MFD_CLOEXEC))
    import tempfile  # where there is no memfd

    fd, path = tempfile.mkstemp(prefix="tp-runner-")
    os.unlink(path)  # noqa: PTH108 - it has no name from here on
    return above_standard(fd)


def above_standard(fd: int) -> int:
    """Return a descriptor of the same file that is none of the standard three.

    Where a program has closed one of these, the system gives its number to the next file, and in a worker it
    is standard input, output or error again.
    """
    if fd > 2:
        return fd
    duplicate: int = fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(fd)
    return duplicate
