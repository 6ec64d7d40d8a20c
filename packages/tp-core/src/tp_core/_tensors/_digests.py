"""Digests of files, which show whether a file is as it was written.

They are against accidents: flipped bits, truncated or mixed-up files. They do not stop an attacker who can
write a checkpoint, and so its manifest with the digests, too. So XXH3 with 128 bits (https://xxhash.com)
is used, and no cryptographic hash: it is about as fast as memory, SHA-256 as one disk. Without xxhash
digests are SHA-256; a record names its algorithm.

A file's digest is the digest of its pieces' digests, so that several cores can check one file.
"""

import hashlib
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal, Protocol

from torch.serialization import get_crc32_options, set_crc32_options

from tp_core._launch._environment import available_cores
from tp_core.errors import StateError

Algorithm = Literal["xxh3_128", "sha256"]

DIGESTS = "digests.json"
"""The name of the file with the digests of the others in a folder of ``tp_shard.save_sharded``."""
INDEX = ".metadata"
"""The name that torch.distributed.checkpoint gives the index of the tensors in a folder."""
DIGEST_SIZE = 16
"""The length of a manifest's own digest, in bytes."""
PIECE = 16 << 20
_CHUNK = 1 << 20
_MAX_THREADS = 4  # more would take cores from the training


class _Digest(Protocol):
    """The interface of hashlib's and xxhash's digests; both release the GIL for long pieces."""

    def update(self, data: bytes | memoryview, /) -> None: ...
    def digest(self) -> bytes: ...
    def hexdigest(self) -> str: ...


@dataclass(frozen=True, slots=True)
class FileRecord:
    """The size and the digest of a file.

    Attributes:
        nbytes: Its size in bytes.
        sha256: The digest of the digests of its pieces of 16 MiB, in hexadecimal digits.
        xxh3_128: The same by XXH3; one of the two is there.

    Raises:
        TypeError: No digest is given, or both are.
    """

    nbytes: int
    sha256: str | None = None
    xxh3_128: str | None = None

    def __post_init__(self) -> None:
        if (self.sha256 is None) == (self.xxh3_128 is None):
            msg = "a file has one digest, xxh3_128 or sha256"
            raise TypeError(msg)

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the digest."""
        return "sha256" if self.xxh3_128 is None else "xxh3_128"

    @property
    def can_be_checked(self) -> bool:
        """Whether the library of its digest is installed."""
        return self.algorithm != "xxh3_128" or _has_xxhash()

    def to_dict(self) -> dict[str, int | str]:
        """Return the record as plain values for JSON; they are the arguments of the constructor."""
        return {"nbytes": self.nbytes, self.algorithm: getattr(self, self.algorithm)}

    def difference(self, path: Path) -> str | None:
        """Return a description of how the file at ``path`` differs, or ``None``."""
        try:
            if not path.is_file():
                return "is missing"
            nbytes = path.stat().st_size
            if nbytes != self.nbytes:
                return f"has {nbytes} bytes of {self.nbytes}"
            return None if record_of(path, self.algorithm) == self else "is not what was written"
        except OSError as error:
            return f"cannot be read: {error}"


def _has_xxhash() -> bool:
    try:
        import xxhash  # noqa: F401 - a machine that was set up by hand may lack it
    except ImportError:
        return False
    return True


def _best() -> Algorithm:
    return "xxh3_128" if _has_xxhash() else "sha256"


def _new(algorithm: Algorithm) -> _Digest:
    if algorithm == "xxh3_128":
        import xxhash

        return xxhash.xxh3_128()
    return hashlib.sha256(usedforsecurity=False)  # against accidents


def digest_of(parts: Iterable[bytes]) -> str:
    """Return the digest of a manifest by BLAKE2b with `DIGEST_SIZE` bytes, in hexadecimal digits.

    The standard library has it: a manifest must be readable where xxhash is not installed.

    Args:
        parts: The bytes, piece by piece; where the pieces begin and end makes no difference.
    """
    digest = hashlib.blake2b(digest_size=DIGEST_SIZE)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def records_of(listed: Mapping[str, Mapping[str, Any]], path: Path) -> dict[str, FileRecord]:
    """Return the records that a file lists, by name.

    Args:
        listed: The results of :meth:`FileRecord.to_dict`, by name.
        path: The file.

    Raises:
        TypeError: They are not records.
        StateError: The library of some digests is not installed.
    """
    records = {str(name): FileRecord(**record) for name, record in listed.items()}
    if not all(record.can_be_checked for record in records.values()):
        msg = f"{path} has digests by xxh3_128, which need xxhash to be checked: pip install xxhash"
        raise StateError(msg)
    return records


def read_digests(folder: Path) -> dict[str, FileRecord]:
    """Return the files of a folder of ``tp_shard.save_sharded``, by name.

    Raises:
        FileNotFoundError: The folder has no checkpoint.
        StateError: The digests are missing or damaged, or their library is not installed.
    """
    path = folder / DIGESTS
    if not path.is_file():
        if not (folder / INDEX).is_file():
            msg = f"there is no checkpoint at {folder}: it has no {DIGESTS}"
            raise FileNotFoundError(msg)
        msg = f"{folder} has no {DIGESTS}: ts.save_sharded() was ended before its end, or did not write it"
        raise StateError(msg)
    try:
        return records_of(json.loads(path.read_text()), path)
    except (ValueError, TypeError, AttributeError) as error:
        msg = f"{path} is damaged: {error}"
        raise StateError(msg) from error


def _record(nbytes: int, pieces: Iterable[bytes], algorithm: Algorithm) -> FileRecord:
    whole = _new(algorithm)
    for piece in pieces:
        whole.update(piece)
    return FileRecord(nbytes, **{algorithm: whole.hexdigest()})


def record_of(path: Path, algorithm: Algorithm | None = None) -> FileRecord:
    """Return the size and the digest of a file.

    Args:
        path: The file.
        algorithm: The algorithm: by default "xxh3_128", and "sha256" where xxhash is not installed.

    Raises:
        OSError: The file cannot be read.
    """
    kind = algorithm or _best()
    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        starts = range(0, nbytes, PIECE)

        def digest(start: int) -> bytes:
            return _digest_piece(file.fileno(), start, kind)

        threads = min(len(starts), available_cores(), _MAX_THREADS)
        if threads < 2:
            return _record(nbytes, map(digest, starts), kind)
        with ThreadPoolExecutor(threads) as pool:
            return _record(nbytes, pool.map(digest, starts), kind)


class DigestingFile:
    """A file that digests bytes as it writes them, so that they need not be read again.

    Args:
        file: The file to write to.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._algorithm = _best()
        self._nbytes = 0
        self._pieces: list[bytes] = []  # digests
        self._piece = _new(self._algorithm)  # the one that is being filled

    def write(self, data: bytes | memoryview, /) -> int:
        """Write and digest ``data``."""
        view, start = memoryview(data).cast("B"), 0
        while start < len(view):
            part = view[start : start + PIECE - self._nbytes % PIECE]
            self._piece.update(part)
            self._file.write(part)
            self._nbytes += len(part)
            start += len(part)
            if self._nbytes % PIECE == 0:
                self._pieces.append(self._piece.digest())
                self._piece = _new(self._algorithm)
        return len(view)

    def flush(self) -> None:
        """Flush the buffer to the system."""
        self._file.flush()

    def tell(self) -> int:
        """Return the number of written bytes."""
        return self._nbytes

    def fileno(self) -> int:
        """Return the file descriptor."""
        return self._file.fileno()

    def close(self) -> None:
        """Close the file; `record` still works."""
        self._file.close()

    def record(self) -> FileRecord:
        """Return the size and the digest of the written bytes."""
        unfinished = [self._piece.digest()] if self._nbytes % PIECE else []
        return _record(self._nbytes, [*self._pieces, *unfinished], self._algorithm)


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


def _digest_piece(handle: int, start: int, algorithm: Algorithm) -> bytes:
    digest = _new(algorithm)
    end = min(start + PIECE, os.fstat(handle).st_size)
    buffer = memoryview(bytearray(min(_CHUNK, max(end - start, 0))))
    # Both calls release the GIL, so that threads digest several pieces at once.
    while start < end and (nbytes := read_at(handle, buffer, start)):
        nbytes = min(nbytes, end - start)
        digest.update(buffer[:nbytes])
        start += nbytes
    return digest.digest()
