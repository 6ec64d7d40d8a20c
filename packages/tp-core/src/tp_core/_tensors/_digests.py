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
from typing import BinaryIO

__all__ = ["DIGEST_SIZE", "DigestingFile", "FileRecord", "digest_of", "record_of"]

DIGEST_SIZE = 16
PIECE = 16 << 20
_CHUNK = 1 << 20
_SMALL = 1 << 16  # bytes that are digested sooner than a thread is asked to
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
    """Writes bytes to a file, while threads digest the same bytes: nothing is read again for it.

    Args:
        file: Where they go.
        pool: The threads.
    """

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor) -> None:
        self._file = file
        self._pool = pool
        self._pieces: list[hashlib.blake2b] = []
        self._nbytes = 0

    def write(self, data: bytes | memoryview, /) -> int:
        """Write and digest ``data``, which may be used otherwise as soon as this returns."""
        view, begun = memoryview(data).cast("B"), list[Future[None]]()
        try:
            start = 0
            while start < len(view):
                place = (self._nbytes + start) % PIECE
                if place == 0:
                    self._pieces.append(hashlib.blake2b(digest_size=DIGEST_SIZE))
                part = view[start : start + PIECE - place]
                if len(part) > _SMALL:
                    begun.append(self._pool.submit(self._pieces[-1].update, part))
                else:
                    self._pieces[-1].update(part)
                start += len(part)
            self._file.write(view)
        finally:
            for update in begun:
                update.result()
        self._nbytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Hand what is buffered to the system."""
        self._file.flush()

    def record(self) -> FileRecord:
        """Return the size and the digest of what was written."""
        return FileRecord(self._nbytes, digest_of(piece.digest() for piece in self._pieces))


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
