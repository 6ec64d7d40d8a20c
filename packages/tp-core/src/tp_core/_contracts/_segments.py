"""A model of torch's allocator of accelerators: the memory that it reserves for what it hands out.

What a device runs out of is what is reserved, and that is more than the tensors have::

    a block of           lies in a segment of     and of a cached one the rest
    up to 1 MiB          2 MiB                    is cached
    below 10 MiB         20 MiB                   is cached where it is more than 1 MiB
    more                 its own size, up to a    is cached where it is more than 1 MiB
                         multiple of 2 MiB

A freed block is merged with its free neighbors, and is cached for the stream that it belongs to. Segments in
which nothing is used are given back only where there is no more memory. These are the rules of torch's
``CUDACachingAllocator``, without the settings of ``PYTORCH_CUDA_ALLOC_CONF``.
"""

from bisect import bisect_left, insort
from collections.abc import Hashable

_MIB = 2**20
_BLOCK = 512


class _Block:
    """A piece of a segment, and its neighbors there."""

    __slots__ = ("address", "is_free", "nbytes", "next", "pool", "previous")

    def __init__(self, address: int, nbytes: int, pool: list[tuple[int, int]]) -> None:
        self.address, self.nbytes, self.pool = address, nbytes, pool
        self.is_free = False
        self.previous: _Block | None = None
        self.next: _Block | None = None


class CachingAllocator:
    """Follows allocations, and counts what torch's allocator reserves for them.

    Args:
        limit: The bytes of the device, for which unused segments are given back; the peak is above it where
            that is not enough. ``None`` for any number.

    Attributes:
        reserved: The bytes of all segments.
        peak: The most that there were.

    Example:
        >>> allocator = CachingAllocator()
        >>> allocator.allocate("weight", 3 * 2**20)
        >>> allocator.peak // 2**20
        20
    """

    def __init__(self, limit: int | None = None) -> None:
        self.reserved = self.peak = 0
        self._limit = limit
        self._next_address = 0
        self._used: dict[Hashable, _Block] = {}
        self._blocks: dict[int, _Block] = {}  # by address
        # Free blocks by size and address, of each stream, small and large ones.
        self._pools: dict[tuple[int, bool], list[tuple[int, int]]] = {}

    def allocate(self, key: Hashable, nbytes: int, *, stream: int = 0) -> None:
        """Hand out memory under a key; nothing for 0 bytes.

        Args:
            key: The name of the memory, which has none at present.
            nbytes: The bytes.
            stream: The stream that it belongs to.
        """
        if nbytes <= 0:
            return
        size = -(-nbytes // _BLOCK) * _BLOCK
        is_small = size <= _MIB
        pool = self._pools.setdefault((stream, is_small), [])
        at = bisect_left(pool, (size, -1))
        if at < len(pool):
            block = self._blocks[pool.pop(at)[1]]
        else:
            block = self._new_segment(size, pool)
        least = _MIB + 1
        if is_small:
            least = _BLOCK
        if block.nbytes - size >= least:
            self._split(block, size)
        block.is_free = False
        self._used[key] = block

    def free(self, key: Hashable) -> None:
        """Take memory back; nothing where the key has none."""
        block = self._used.pop(key, None)
        if block is None:
            return
        for other in (block.previous, block.next):
            if other is not None and other.is_free:
                other.pool.remove((other.nbytes, other.address))
                block = self._merged(block, other)
        block.is_free = True
        insort(block.pool, (block.nbytes, block.address))

    def _new_segment(self, size: int, pool: list[tuple[int, int]]) -> _Block:
        if size <= _MIB:
            nbytes = 2 * _MIB
        elif size < 10 * _MIB:
            nbytes = 20 * _MIB
        else:
            nbytes = -(-size // (2 * _MIB)) * 2 * _MIB
        if self._limit is not None and self.reserved + nbytes > self._limit:
            self._give_back()
            if self.reserved + nbytes > self._limit:  # nothing is left to give back, here or later
                self._limit = None
        block = _Block(self._next_address, nbytes, pool)
        self._blocks[block.address] = block
        self._next_address += nbytes
        self.reserved += nbytes
        self.peak = max(self.peak, self.reserved)
        return block

    def _give_back(self) -> None:
        """Give segments back in which nothing is used."""
        for pool in self._pools.values():
            for entry in list(pool):
                block = self._blocks[entry[1]]
                if block.previous is None and block.next is None:
                    pool.remove(entry)
                    del self._blocks[block.address]
                    self.reserved -= block.nbytes

    def _split(self, block: _Block, size: int) -> None:
        rest = _Block(block.address + size, block.nbytes - size, block.pool)
        rest.is_free = True
        rest.previous, rest.next = block, block.next
        if block.next is not None:
            block.next.previous = rest
        block.next, block.nbytes = rest, size
        self._blocks[rest.address] = rest
        insort(block.pool, (rest.nbytes, rest.address))

    def _merged(self, block: _Block, other: _Block) -> _Block:
        """Return the first of two neighbors with the memory of both."""
        first, second = sorted((block, other), key=lambda each: each.address)
        first.nbytes += second.nbytes
        first.next = second.next
        if second.next is not None:
            second.next.previous = first
        del self._blocks[second.address]
        return first
