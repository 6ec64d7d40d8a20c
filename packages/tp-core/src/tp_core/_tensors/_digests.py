"""The digest of a file, computed on several cores.

One core digests about as fast as one disk writes. So a file's digest is that of its pieces' digests,
which are computed side by side: a tree of two levels.
"""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import BinaryIO

__all__ = ["DIGEST_SIZE", "DigestingFile", "FileRecord", "digest_of", "record_of"]

DIGEST_SIZE = 16
PIECE = 16 << 20
_CHUNK = 1 << 20
_PIECES_BEHIND = 3  # how far digesting may fall behind writing: 48 MiB
_MAX_THREADS = 4  # more would take the cores from the training that goes on


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What is known of a file.

    Attributes:
        nbytes: How long it is.
        blake2b: The digest of the digests of its pieces of 16 MiB, in hexadecimal digits.
    """

    nbytes: int
    blake2b: str

    def difference(self, path: Path) -> str | None:
        """Return in words how the file at ``path`` differs from this one, if it does."""
        try:
            if not path.is_file():
                return "is missing"
            nbytes = path.stat().st_size
            if nbytes != self.nbytes:
                return f"has {nbytes} bytes of {self.nbytes}"
            return None if record_of(path) == self else "is not what was written"
        except OSError as error:
            return f"cannot be read: {error}"


def digest_of(parts: Iterable[bytes]) -> str:
    """Return the digest of bytes, in hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def record_of(path: Path) -> FileRecord:
    """Return the size and the digest of a file.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        starts = range(0, nbytes, PIECE)

        def digest(start: int) -> bytes:
            return _digest_piece(file.fileno(), start).digest()

        threads = min(len(starts), os.cpu_count() or 1, _MAX_THREADS)
        if threads < 2:
            return FileRecord(nbytes, digest_of(map(digest, starts)))
        with ThreadPoolExecutor(threads) as pool:
            return FileRecord(nbytes, digest_of(pool.map(digest, starts)))


class DigestingFile:
    """Writes bytes to a file, while threads digest copies of them: nothing is read again for it.

    The threads may fall behind by a few pieces. So a writer waits for them only where they are slower
    than the disk, and what is still to be digested is digested while the system brings the file onto it.

    Args:
        file: Where the bytes go.
        pool: The threads.
    """

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor) -> None:
        self._file = file
        self._pool = pool
        self._digests: list[Future[bytes]] = []
        self._nbytes = 0
        self._piece = bytearray(PIECE)  # the one that is being filled
        self._filled = 0
        self._unused: SimpleQueue[bytearray] = SimpleQueue()
        for _ in range(_PIECES_BEHIND):
            self._unused.put(bytearray(PIECE))  # costs no memory until something is written into it

    def write(self, data: bytes | memoryview, /) -> int:
        """Write and digest ``data``, which may be used otherwise as soon as this returns."""
        view, start = memoryview(data).cast("B"), 0
        while start < len(view):
            part = view[start : start + PIECE - self._filled]
            self._piece[self._filled : self._filled + len(part)] = part
            self._filled += len(part)
            start += len(part)
            if self._filled == PIECE:
                self._end_piece()
        self._file.write(view)
        self._nbytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._file.flush()

    def record(self) -> FileRecord:
        """Return the size and the digest of what was written; nothing is written afterwards."""
        if self._filled:
            self._end_piece()
        return FileRecord(self._nbytes, digest_of(digest.result() for digest in self._digests))

    def _end_piece(self) -> None:
        self._digests.append(self._pool.submit(self._digest, self._piece, self._filled))
        self._piece, self._filled = self._unused.get(), 0  # waits until a thread is done with one

    def _digest(self, piece: bytearray, nbytes: int) -> bytes:
        try:
            return hashlib.blake2b(memoryview(piece)[:nbytes], digest_size=DIGEST_SIZE).digest()
        finally:
            self._unused.put(piece)


def _digest_piece(handle: int, start: int) -> "hashlib.blake2b":
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
    end = min(start + PIECE, os.fstat(handle).st_size)
    buffer = memoryview(bytearray(min(_CHUNK, max(end - start, 0))))
    # The interpreter lets other threads run while one reads or digests.
    while start < end and (nbytes := os.preadv(handle, [buffer], start)):
        nbytes = min(nbytes, end - start)
        digest.update(buffer[:nbytes])
        start += nbytes
    return digest
