"""The digest of a file, computed on several cores.

One core digests about as fast as one disk writes. So a file's digest is that of its pieces' digests,
which are computed side by side: a tree of two levels. SHA-256, which processors have instructions for,
takes half the time of BLAKE2b there; checkpoints of earlier versions have the latter.
"""

import ctypes
import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

from torch import Tensor

from tp_core._launch._cores import available_cores

__all__ = ["DIGEST_SIZE", "DigestingFile", "FileRecord", "digest_of", "record_of"]

Algorithm = Literal["sha256", "blake2b"]

DIGEST_SIZE = 16  # of BLAKE2b
PIECE = 16 << 20
_CHUNK = 1 << 20
_SMALL = 1 << 16  # bytes that are copied sooner than looked up
_COPIES = 4  # pieces of copies that may wait to be digested: 64 MiB
_MAX_THREADS = 4  # more would take the cores from the training that goes on


@dataclass(frozen=True, slots=True)
class FileRecord:
    """What is known of a file.

    Attributes:
        nbytes: How long it is.
        sha256: The digest of the digests of its pieces of 16 MiB, in hexadecimal digits.
        blake2b: The same in a file that an earlier version has written; one of the two is there.

    Raises:
        TypeError: Neither digest is given, or both are.
    """

    nbytes: int
    sha256: str | None = None
    blake2b: str | None = None

    def __post_init__(self) -> None:
        if (self.sha256 is None) == (self.blake2b is None):
            msg = "a file has one digest, sha256 or blake2b"
            raise TypeError(msg)

    def to_dict(self) -> dict[str, int | str]:
        """Return the record as JSON can hold it; its items are the arguments of another one."""
        found = {"nbytes": self.nbytes, "sha256": self.sha256, "blake2b": self.blake2b}
        return {name: value for name, value in found.items() if value is not None}

    def difference(self, path: Path) -> str | None:
        """Return in words how the file at ``path`` differs from this one, if it does."""
        try:
            if not path.is_file():
                return "is missing"
            nbytes = path.stat().st_size
            if nbytes != self.nbytes:
                return f"has {nbytes} bytes of {self.nbytes}"
            algorithm: Algorithm = "sha256" if self.blake2b is None else "blake2b"
            return None if record_of(path, algorithm) == self else "is not what was written"
        except OSError as error:
            return f"cannot be read: {error}"


def _new(algorithm: Algorithm) -> "hashlib._Hash | hashlib.blake2b":
    if algorithm == "sha256":
        return hashlib.sha256(usedforsecurity=False)  # against accidents
    return hashlib.blake2b(digest_size=DIGEST_SIZE)


def digest_of(parts: Iterable[bytes], algorithm: Algorithm = "blake2b") -> str:
    """Return the digest of bytes, in hexadecimal digits."""
    digest = _new(algorithm)
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _record(nbytes: int, pieces: Iterable[bytes], algorithm: Algorithm) -> FileRecord:
    digest = digest_of(pieces, algorithm)
    return FileRecord(nbytes, sha256=digest) if algorithm == "sha256" else FileRecord(nbytes, blake2b=digest)


def record_of(path: Path, algorithm: Algorithm = "sha256") -> FileRecord:
    """Return the size and the digest of a file.

    Args:
        path: The file.
        algorithm: Which digest.

    Raises:
        OSError: The file cannot be read.
    """
    with path.open("rb") as file:
        nbytes = os.fstat(file.fileno()).st_size
        starts = range(0, nbytes, PIECE)

        def digest(start: int) -> bytes:
            return _digest_piece(file.fileno(), start, algorithm)

        threads = min(len(starts), available_cores(), _MAX_THREADS)
        if threads < 2:
            return _record(nbytes, map(digest, starts), algorithm)
        with ThreadPoolExecutor(threads) as pool:
            return _record(nbytes, pool.map(digest, starts), algorithm)


class DigestingFile:
    """Writes bytes to a file, while threads digest them: nothing is read again for it.

    The threads may fall behind: what lies in the memory of ``kept`` is digested where it is, while more is
    written and while the system brings the file onto the disk.

    Args:
        file: Where the bytes go.
        pool: The threads.
        kept: Tensors whose memory stays as it is until the record is asked for.
    """

    def __init__(self, file: BinaryIO, pool: ThreadPoolExecutor, kept: Iterable[Tensor] = ()) -> None:
        self._file = file
        self._pool = pool
        tensors = (tensor for tensor in kept if tensor.device.type == "cpu")
        self._kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
        self._digests: list[Future[bytes]] = []
        self._nbytes = 0
        self._piece: list[bytes | memoryview] = []  # the one that is being filled
        self._filled = 0

    def write(self, data: bytes | memoryview, /) -> int:
        """Write and digest ``data``; what is not in the memory of a kept tensor is copied."""
        view, start = memoryview(data).cast("B"), 0
        storage = self._kept.get(_address(view)) if len(view) > _SMALL else None
        is_kept = storage is not None and len(view) <= storage.nbytes()
        while start < len(view):
            part = view[start : start + PIECE - self._filled]
            self._piece.append(part if is_kept else bytes(part))
            self._filled += len(part)
            start += len(part)
            if self._filled == PIECE:
                self._end_piece()
                if not is_kept and len(self._digests) > _COPIES:
                    self._digests[-_COPIES].result()
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
        return _record(self._nbytes, (digest.result() for digest in self._digests), "sha256")

    def _end_piece(self) -> None:
        self._digests.append(self._pool.submit(_digest_parts, self._piece))
        self._piece, self._filled = [], 0


def _digest_parts(parts: Iterable[bytes | memoryview]) -> bytes:
    digest = _new("sha256")
    for part in parts:
        digest.update(part)
    return digest.digest()


class _Buffer(ctypes.Structure):
    """Python's ``Py_buffer``, which is part of its stable interface."""

    _fields_ = (
        ("address", ctypes.c_void_p),
        ("obj", ctypes.c_void_p),
        ("nbytes", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_void_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    )


def _address(view: memoryview) -> int:
    """Return where the bytes of a view lie; ctypes itself asks that of writable memory alone."""
    buffer = _Buffer()
    ctypes.pythonapi.PyObject_GetBuffer(ctypes.py_object(view), ctypes.byref(buffer), 0)
    try:
        return int(buffer.address or 0)
    finally:
        ctypes.pythonapi.PyBuffer_Release(ctypes.byref(buffer))


def _digest_piece(handle: int, start: int, algorithm: Algorithm) -> bytes:
    digest = _new(algorithm)
    end = min(start + PIECE, os.fstat(handle).st_size)
    buffer = memoryview(bytearray(min(_CHUNK, max(end - start, 0))))
    # The interpreter lets other threads run while one reads or digests.
    while start < end and (nbytes := os.preadv(handle, [buffer], start)):
        nbytes = min(nbytes, end - start)
        digest.update(buffer[:nbytes])
        start += nbytes
    return digest.digest()
