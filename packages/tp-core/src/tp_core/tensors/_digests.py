"""Digests of files, which show whether a file is as it was written.

They are against accidents: flipped bits, truncated or mixed-up files. They do not stop an attacker who can
write a checkpoint, and so its manifest with the digests, too. So XXH3 with 128 bits (https://xxhash.com)
is used, and no cryptographic hash: it is about as fast as memory, SHA-256 as one disk.

A file's digest is the digest of its pieces' digests, so that several cores can check one file.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from torch.serialization import get_crc32_options, set_crc32_options

from tp_core._launch._cores import available_cores
from tp_core.errors import StateError
from tp_core.files._reads import is_absence, is_regular_file, retry_read

if TYPE_CHECKING:
    from xxhash import xxh3_128

DIGESTS = "digests.json"
"""The name of the file with the digests of the others in a folder of ``tp_shard.save_sharded``."""
INDEX = "index.json"
"""The name of the index of the tensors in a folder."""
DIGEST_SIZE = 16
"""The length of a manifest's own digest, in bytes."""
PIECE = 16 << 20
_CHUNK = 1 << 20
_IN_MEMORY = 4  # pieces of a file that is written
_MAX_THREADS = 4  # more would take cores from the training


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The size and the digest of a file.

    Attributes:
        nbytes: Its size in bytes.
        xxh3_128: The digest of the digests of its pieces of 16 MiB, in hexadecimal digits.
    """

    nbytes: int
    xxh3_128: str

    def to_dict(self) -> dict[str, int | str]:
        """Return the record as plain values for JSON; they are the arguments of the constructor."""
        return {"nbytes": self.nbytes, "xxh3_128": self.xxh3_128}

    def difference(self, path: Path) -> str | None:
        """Return a description of how the file at ``path`` differs, or ``None``.

        Raises:
            OSError: The file is there, and could not be read for some seconds: it need not differ.
        """
        try:
            return retry_read(lambda: self._difference(path))
        except OSError as error:
            if is_absence(error):  # deleted in between
                return "is missing"
            raise

    def _difference(self, path: Path) -> str | None:
        if not is_regular_file(path):
            return "is missing"
        nbytes = path.stat().st_size
        if nbytes != self.nbytes:
            return f"has {nbytes} bytes of {self.nbytes}"
        if record_of(path) == self:
            return None
        return "is not what was written"


def _new_digest() -> "xxh3_128":
    from xxhash import xxh3_128  # here: what imports a package loads little beside torch

    return xxh3_128()


def digest_of(parts: Iterable[bytes]) -> str:
    """Return the digest of a manifest by BLAKE2b with `DIGEST_SIZE` bytes, in hexadecimal digits.

    Args:
        parts: The bytes, piece by piece; where the pieces begin and end makes no difference.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def read_digests(folder: Path) -> dict[str, FileRecord]:
    """Return the files of a folder of ``tp_shard.save_sharded``, by name.

    Raises:
        FileNotFoundError: The folder has no checkpoint.
        OSError: The digests could not be read for some seconds.
        StateError: The digests are missing or damaged.
    """
    path = folder / DIGESTS
    if not retry_read(lambda: is_regular_file(path)):
        if not is_regular_file(folder / INDEX):
            msg = f"there is no checkpoint at {folder}: it has no {DIGESTS}"
            raise FileNotFoundError(msg)
        msg = f"{folder} has no {DIGESTS}: ts.save_sharded() was ended before its end, or did not write it"
        raise StateError(msg)
    try:
        listed = json.loads(retry_read(path.read_text))
        return {str(name): FileRecord(**record) for name, record in listed.items()}
    except (ValueError, TypeError, AttributeError) as error:
        msg = f"{path} is damaged: {error}"
        raise StateError(msg) from error


def _record(nbytes: int, pieces: Iterable[bytes]) -> FileRecord:
    whole = _new_digest()
    for piece in pieces:
        whole.update(piece)
    return FileRecord(nbytes, whole.hexdigest())


def record_of(path: Path) -> FileRecord:
    """Return the size and the digest of a file.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        handle = file.fileno()
        nbytes = os.fstat(handle).st_size
        starts = range(0, nbytes, PIECE)
        threads = min(len(starts), available_cores(), _MAX_THREADS)
        if threads < 2:
            return _record(nbytes, (_digest_piece(handle, start) for start in starts))
        with ThreadPoolExecutor(threads) as pool:
            return _record(nbytes, pool.map(partial(_digest_piece, handle), starts))


class DigestingFile:
    """A file that digests bytes as it writes them, so that they need not be read again.

    It has the system bring each piece to the disk at once, while the next one is made, and forget it a few
    pieces later. A checkpoint is as large as what fits into memory, and is read after a failure alone: left
    to itself the system keeps all of it, in the place of files that the training reads, and a save waits for
    free pages and for the whole at its end.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._nbytes = 0
        self._pieces: list[bytes] = []  # digests
        self._piece = _new_digest()  # the one that is being filled

    def write(self, data: bytes | memoryview, /) -> int:
        view, start = memoryview(data).cast("B"), 0
        while start < len(view):
            # Chunks that stay in the processor's cache between the digest and the write.
            part = view[start : start + min(_CHUNK, PIECE - self._nbytes % PIECE)]
            self._piece.update(part)
            self._file.write(part)
            self._nbytes += len(part)
            start += len(part)
            if self._nbytes % PIECE == 0:
                self._pieces.append(self._piece.digest())
                self._piece = _new_digest()
                self._write_back()
        return len(view)

    def _write_back(self) -> None:
        """Have the system write the last pieces, and forget those that are written: an advice."""
        self._file.flush()
        if hasattr(os, "posix_fadvise"):
            first = max(0, self._nbytes - _IN_MEMORY * PIECE)
            with suppress(OSError):  # of file systems that take no advice, and of what is no file
                os.posix_fadvise(self._file.fileno(), first, self._nbytes - first, os.POSIX_FADV_DONTNEED)

    def flush(self) -> None:
        self._file.flush()

    def tell(self) -> int:
        return self._nbytes

    def fileno(self) -> int:
        return self._file.fileno()

    def close(self) -> None:
        self._file.close()

    def record(self) -> FileRecord:
        if self._nbytes % PIECE:
            unfinished = [self._piece.digest()]
        else:
            unfinished = []
        return _record(self._nbytes, [*self._pieces, *unfinished])


@contextmanager
def without_checksums() -> Iterator[None]:
    """Make ``torch.save`` omit its checksums, which cost more than a digest and are never checked."""
    before = get_crc32_options()
    set_crc32_options(False)
    try:
        yield
    finally:
        set_crc32_options(before)


_seeking = threading.Lock()


def read_at(handle: int, memory: memoryview, position: int) -> int:
    """Read bytes of a file from a position on into memory; return how many.

    Threads may share the descriptor.
    """
    if hasattr(os, "preadv"):
        return os.preadv(handle, [memory], position)
    with _seeking:  # on Windows: another thread would move the position between the two calls
        os.lseek(handle, position, os.SEEK_SET)
        data = os.read(handle, len(memory))
    memory[: len(data)] = data
    return len(data)


def _digest_piece(handle: int, start: int) -> bytes:
    digest = _new_digest()
    end = min(start + PIECE, os.fstat(handle).st_size)
    buffer = memoryview(bytearray(min(_CHUNK, max(end - start, 0))))
    # Both calls release the GIL, so that threads digest several pieces at once.
    while start < end and (nbytes := read_at(handle, buffer, start)):
        nbytes = min(nbytes, end - start)
        digest.update(buffer[:nbytes])
        start += nbytes
    return digest.digest()
