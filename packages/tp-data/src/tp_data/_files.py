"""Files of samples: where each sample begins, local copies of what is remote or compressed.

An index is made once for each file, and serves all runs and processes::

    data/a.jsonl                     data/.tp-data/a.jsonl.lines.index      a header as JSON, then the offsets
    https://host/a.jsonl.gz          CACHE/3f0c...-a.jsonl, and its index   a copy: read once, decompressed

A file is what it was if its size and its times are; of a remote one its tag, too. Else the index is made
again. Only one process makes it, and the others wait; it appears whole, or not at all.

Each read looks at the times again, behind the bytes that it took: a file that is written anew under an open
loader is an error, and no text of it is cut in the middle.
"""

import glob
import json
import lzma
import os
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from tp_core.arguments import explain_init
from tp_core.errors import ConfigError, LoaderError
from tp_core.files import is_absence, is_regular_file, retry_read, write_atomically
from tp_core.launching import available_cores
from tp_core.messages import check_installed, file_meant
from tp_core.output import get_logger

from tp_data._order import key_of
from tp_data._scans import CHUNK_NBYTES, SCANS, digest_of

log = get_logger("tp_data")

T = TypeVar("T")

_FORMAT = 2
_HEADER_NBYTES = 1024
_WINDOW_NBYTES = 1 << 31  # of frames of zstd --long=31, the longest there are
_FREE_NBYTES, _FREE_PART = 5 << 30, 20  # copies leave so much of a disk free, or this part if it is less
_COMPRESSED = {".gz": "gzip", ".bz2": "bz2", ".xz": "xz", ".zst": "zstd"}
_MOST_OPEN = 128  # files of a process; systems allow 1024, and the program has others
_WAIT_S = 3600.0  # for another process that makes an index
_TICK_S = 0.02  # systems count times of files in ticks of at most 10 ms
_GAP_NBYTES = 4096  # between two samples that are read at once: skipping it costs more than reading it

_open: dict[tuple[str, str], int] = {}  # descriptors, the oldest first
_TAGS = ("ETag", "etag", "mtime", "LastModified", "last_modified", "created", "md5")


@explain_init
@dataclass(frozen=True, slots=True)
class Access:
    """How remote files are read, and where copies and indexes are kept.

    Attributes:
        cache: The folder of copies of remote and compressed files, and of indexes. By default an index lies
            beside its file, in a folder ``.tp-data``, and all else in ``$TP_DATA_CACHE`` or
            ``~/.cache/tp-data``.
        timeout_s: How long a remote file may say nothing.
        attempts: How often a remote file is asked before it counts as dead.
        rest_s: The rest before the second attempt; it doubles from one to the next.
        options: Options of the file system, for fsspec, such as the key of a bucket.
    """

    cache: str | os.PathLike[str] | None = None
    timeout_s: float = 60.0
    attempts: int = 4
    rest_s: float = 1.0
    options: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.attempts < 1 or self.timeout_s <= 0 or self.rest_s < 0:
            msg = (
                f"Access(timeout_s={self.timeout_s!r}, attempts={self.attempts!r}, rest_s={self.rest_s!r}): "
                "a file needs an attempt, more than 0 seconds to answer, and a rest of 0 seconds or more"
            )
            raise ConfigError(msg)

    @property
    def folder(self) -> Path:
        """The folder of copies, and of indexes that cannot lie beside their files."""
        cache = self.cache or os.environ.get("TP_DATA_CACHE")
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        return Path(cache or f"{base}/tp-data").expanduser()

    def attempt(self, what: str, action: Callable[[], T]) -> T:
        """Return what an action on a remote file returns, after several attempts if need be.

        Raises:
            LoaderError: All attempts failed, or took too long.
        """
        error: BaseException | None = None
        for number in range(self.attempts):
            if number:
                time.sleep(self.rest_s * 2 ** (number - 1))
            try:
                return self._in_time(action)
            except (FileNotFoundError, PermissionError) as missing:
                msg = f"{what} cannot be read: {missing}"
                raise LoaderError(msg) from missing
            except Exception as failure:  # noqa: BLE001 - every library of a protocol has its own
                error = failure
                failed = _describe(failure)
                log.warning("%s, attempt %d of %d: %s", what, number + 1, self.attempts, failed)
        msg = (
            f"{what} could not be read in {self.attempts} attempts; the last one: {_describe(error)}; look "
            "at the network and the server, or set Access(attempts=..., timeout_s=...)"
        )
        raise LoaderError(msg) from error

    def _in_time(self, action: Callable[[], T]) -> T:
        results: list[T] = []
        errors: list[BaseException] = []

        def run() -> None:
            try:
                results.append(action())
            except BaseException as error:  # noqa: BLE001 - raised in the caller
                errors.append(error)

        # A daemon: a read that never returns cannot be ended, and must not keep the program alive.
        thread = threading.Thread(target=run, name="tp-data", daemon=True)
        thread.start()
        thread.join(self.timeout_s)
        if errors:
            raise errors[0]
        if not results:
            msg = f"no answer within {self.timeout_s:g} s"
            raise TimeoutError(msg)
        return results[0]


def _describe(error: BaseException | None) -> str:
    return f"{type(error).__name__}: {error}".rstrip(": ")


def find_files(files: str | os.PathLike[str] | Iterable[str | os.PathLike[str]], access: Access) -> list[str]:
    """Return the files of paths, URLs and patterns; those of a pattern in the order of their names.

    Raises:
        ConfigError: A pattern or a folder has no file, or a file does not exist.
    """
    if isinstance(files, str | os.PathLike):
        patterns = [files]
    elif not isinstance(files, Iterable):
        msg = f"files are a path or a list of paths, got {type(files).__name__}: {files!r:.80}"
        raise ConfigError(msg)
    else:
        patterns = list(files)
    paths: list[str] = []
    for pattern in patterns:
        path = os.fspath(pattern)
        if "://" in path or path.startswith("memory:"):
            if any(sign in path.partition("://")[2] for sign in "*["):
                paths += access.attempt(path, lambda at=path: _remote_glob(at, access))  # type: ignore[misc]
            else:
                paths.append(path)
            continue
        is_pattern = any(sign in path for sign in "*?[")
        # Not Path.glob: a pattern may be absolute.
        matching = sorted(glob.glob(path, recursive=True)) if is_pattern else [path]  # noqa: PTH207
        if not matching:
            msg = f"no file matches {path!r} (from {Path.cwd()})"
            raise ConfigError(msg)
        paths += matching
    for path in paths:
        if "://" not in path and not is_regular_file(Path(path)):
            if Path(path).is_dir():
                problem = "is a folder; give a pattern, such as"
            else:
                problem = "does not exist"
            if Path(path).is_dir():
                hint = f" {path.rstrip('/')}/*.jsonl"
            else:
                hint = file_meant(Path(path))
            msg = f"{path} {problem}{hint}"
            raise ConfigError(msg)
    if twice := sorted({path for path in paths if paths.count(path) > 1}):
        msg = f"{twice[0]} is in the list of files twice; name it once, or mix two sources"
        raise ConfigError(msg)
    if not paths:
        msg = "a source needs at least one file, got none"
        raise ConfigError(msg)
    return paths


def _remote_glob(pattern: str, access: Access) -> list[str]:
    import fsspec

    system, path = fsspec.core.url_to_fs(pattern, **(access.options or {}))
    urls = sorted(system.unstrip_protocol(name) for name in system.glob(path))
    if not urls:
        raise FileNotFoundError(pattern)
    return urls


# -- Indexes --------------------------------------------------------------------------------------


class ChangedFileError(LoaderError):
    """A file that is another one than was indexed, or cannot be read: not one sample is lost, but all."""


class IndexedFile:
    """A file with the offsets of its samples. Each process opens it for itself, when it first reads.

    Attributes:
        url: The file as it was given.
        digest: A digest of its content.
        left_out: How many members of a tar are in no sample.
    """

    def __init__(self, url: str, kind: str, access: Access) -> None:
        """Find the index of a file, or make it.

        Raises:
            LoaderError: The file cannot be read, or is not whole.
        """
        self.url, self._kind, self._access = url, kind, access
        self._is_local = "://" not in url
        name = Path(url).name
        compression = _COMPRESSED.get(Path(name).suffix.lower())
        self._compression = compression
        if compression is not None:
            name = name[: -len(Path(name).suffix)]
        self._is_copy = not self._is_local or compression is not None
        place = str(Path(url).absolute()) if self._is_local else url
        key = f"{key_of(place):016x}"
        folder = self._folder()
        if not self._is_copy:
            self.path = Path(url)
        else:
            self.path = access.folder / f"{key}-{name}"
        beside = folder == Path(url).parent / ".tp-data"
        stem = name if beside else f"{key}-{name}"
        self._index = folder / f"{stem}.{kind}.index"
        header = self._read_header()
        if header is None or header["version"] != self._version():
            header = self._make()
        self.digest: str = header["digest"]
        self.left_out: int = header["left_out"]
        self._stat: list[Any] = header["stat"]
        self._count: int = header["samples"]
        self._key = str(self.path), str(self._stat)  # a file that was replaced is another one
        self._offsets: Any = None

    def __len__(self) -> int:
        return self._count

    def _folder(self) -> Path:
        if self._is_copy or self._access.cache is not None:
            return self._access.folder
        beside = Path(self.url).parent / ".tp-data"
        written = beside if beside.exists() else beside.parent
        if os.access(written, os.W_OK):
            return beside
        return self._access.folder

    def _version(self) -> list[Any]:
        """Return what changes when the file does.

        Raises:
            LoaderError: The file is not there.
        """
        if self._is_local:
            try:
                stat = retry_read(Path(self.url).stat)
            except OSError as error:
                msg = f"{self.url} cannot be read: {error.strerror}"
                raise LoaderError(msg) from error
            return _version_of(stat)

        def look() -> list[Any]:
            import fsspec

            system, path = fsspec.core.url_to_fs(self.url, **(self._access.options or {}))
            info = system.info(path)
            return [info.get("size"), *(str(info[tag]) for tag in _TAGS if info.get(tag) is not None)]

        return self._access.attempt(self.url, look)

    def _read_header(self) -> dict[str, Any] | None:
        """Return the header of the index; ``None`` where it, or the copy, is not there or not whole.

        Raises:
            LoaderError: One of them could not be read for some seconds.
        """

        def read() -> tuple[bytes, int, int | None]:
            with self._index.open("rb") as file:
                head, nbytes = file.read(_HEADER_NBYTES), os.fstat(file.fileno()).st_size
            if self._is_copy:
                copied_nbytes = self.path.stat().st_size
            else:
                copied_nbytes = None
            return head, nbytes, copied_nbytes

        try:
            head, nbytes, copied = retry_read(read)
        except OSError as error:
            if is_absence(error):
                return None
            msg = f"the index of {self.url} cannot be read, and nothing was changed: {error}"
            raise LoaderError(msg) from error
        header = _parse_header(head)
        if header is None or nbytes != _HEADER_NBYTES + 8 * (header["samples"] + 1):
            return None
        if copied is not None and copied != header["stat"][0]:
            return None
        return header

    def _make(self) -> dict[str, Any]:
        from filelock import FileLock, Timeout

        self._index.parent.mkdir(parents=True, exist_ok=True)
        try:
            # Two runs that begin at once would both read the whole file.
            with FileLock(f"{self._index}.lock", timeout=_WAIT_S):
                version = self._version()
                header = self._read_header()
                if header is not None and header["version"] == version:
                    return header
                if self._is_copy:
                    write_atomically(self._copy_to, self.path)
                elif abs(time.time() - self.path.stat().st_ctime) < _TICK_S:
                    time.sleep(_TICK_S)  # what is written in the same tick would have the same times
                scan = SCANS[self._kind](self.path, self.url)
                stat = _version_of(self.path.stat())
                if not self._is_copy and version != stat:
                    msg = f"{self.url} was changed while its index was made; begin again once it is complete"
                    raise LoaderError(msg)
                header = {
                    "format": _FORMAT,
                    "version": version,
                    "stat": stat,
                    "samples": len(scan.offsets) - 1,
                    "digest": scan.digest,
                    "left_out": scan.left_out,
                }
                text = json.dumps(header).encode().ljust(_HEADER_NBYTES)
                data = scan.offsets.astype("<u8").tobytes()
                write_atomically(lambda part: _write(part, text, data), self._index)
                return header
        except Timeout as error:
            msg = f"another process has been making {self._index} of {self.url} for {_WAIT_S:g} s"
            raise LoaderError(msg) from error

    def _copy_to(self, part: Path) -> None:
        import fsspec

        def opened() -> Any:
            is_zstd = self._compression == "zstd"
            how = None if is_zstd else self._compression
            file = fsspec.open(self.url, "rb", compression=how, **options).open()
            if is_zstd:
                return _ZstdFile(file)
            return file

        options = {} if self._is_local else self._access.options or {}
        if self._compression == "zstd":
            check_installed("zstandard", by=f"a file such as {self.url}", extra="tp-data[zstd]")

        def decompressed() -> Iterator[bytes]:
            try:
                with closing(opened()) as file:
                    while chunk := file.read(CHUNK_NBYTES):
                        yield chunk
            except (OSError, EOFError, ValueError, zlib.error, lzma.LZMAError) as error:
                msg = f"{self.url} cannot be decompressed: {_describe(error)}; is it whole?"
                if isinstance(error, OSError) and error.errno is not None:  # the system's, not the format's
                    msg = f"{self.url} cannot be read: {error}"
                raise LoaderError(msg) from error

        with part.open("wb") as out:
            if self._is_local:
                for chunk in decompressed():
                    self._check_space(part, out.tell(), len(chunk))
                    out.write(chunk)
                return
            open_files: list[Any] = []

            def read() -> bytes:
                if not open_files:
                    # Open again after a failure, where the last attempt ended.
                    open_files.append(opened())
                    open_files[0].seek(out.tell())
                try:
                    data: bytes = open_files[0].read(CHUNK_NBYTES)
                except BaseException:
                    open_files.clear()
                    raise
                return data

            while chunk := self._access.attempt(f"{self.url}, byte {out.tell()}", read):
                self._check_space(part, out.tell(), len(chunk))
                out.write(chunk)

    def _check_space(self, part: Path, nbytes: int, more: int) -> None:
        """Check that a copy leaves space on the disk: a small file may be a large one decompressed.

        Raises:
            LoaderError: It does not.
        """
        disk = shutil.disk_usage(part.parent)
        if disk.free - more < min(_FREE_NBYTES, disk.total // _FREE_PART):
            msg = (
                f"the copy of {self.url} has {nbytes:,} bytes, is not complete, and leaves {disk.free:,} of "
                f"{disk.total:,} bytes of the disk of {part.parent}: remove what is there, or give another "
                "folder: Access(cache=...)"
            )
            raise LoaderError(msg)

    # -- reading ------------------------------------------------------------------------------------

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_offsets": None}

    def span(self, index: int) -> tuple[int, int]:
        """Return where a sample begins and ends, in bytes."""
        if self._offsets is None:
            try:
                shape = (self._count + 1,)
                # Numbers of a memory view are Python's own, and ten times as fast to read as an array's.
                offsets: Any = retry_read(lambda: np.memmap(self._index, "<u8", "r", _HEADER_NBYTES, shape))
                self._offsets = memoryview(offsets)
            except (OSError, ValueError) as error:
                how = "cannot be read"
                if isinstance(error, ValueError) or is_absence(error):
                    how = "is gone; begin again to make it"
                msg = f"{self._index}, the index of {self.url}, {how}: {error}"
                raise ChangedFileError(msg) from error
        return self._offsets[index], self._offsets[index + 1]

    def _descriptor(self) -> int:
        """Return an open descriptor of the file.

        `os.pread` moves no position, so threads and forked processes share it. A map of the file into memory
        would kill the process where another one cuts the file off.
        """
        if (number := _open.get(self._key)) is not None:
            return number
        number = os.open(self.path, os.O_RDONLY)
        while len(_open) >= _MOST_OPEN:
            os.close(_open.pop(next(iter(_open))))
        _open[self._key] = number
        return number

    def _read_at(self, start: int, stop: int) -> bytes:
        """Return bytes of the file; fewer, where it ends before them.

        Raises:
            ChangedFileError: It is gone, or could not be read for some seconds.
        """

        def read() -> bytes:
            descriptor = self._descriptor()
            try:
                return os.pread(descriptor, stop - start, start)
            except OSError:  # a handle of a network file system may be stale: open the file again
                if _open.pop(self._key, None) is not None:
                    os.close(descriptor)
                raise

        try:
            return retry_read(read)
        except OSError as error:
            raise self.unreadable(error) from error

    def unreadable(self, error: OSError) -> ChangedFileError:
        """Return the error to raise where the system cannot read the file."""
        msg = f"{self.url} cannot be read: {error}"
        if is_absence(error):
            why = error.strerror
            msg = f"{self.url} is gone since its index was made ({why}); put it back, or leave it out"
        return ChangedFileError(msg)

    def _check(self, stat: os.stat_result) -> None:
        """Check that a file is the one that was indexed, by what the system says of it.

        Raises:
            LoaderError: It has changed.
        """
        if _version_of(stat) == self._stat:
            return
        *before, _ = self._stat
        *now, _ = _version_of(stat)
        if before == now:  # a permission may have changed, a name, or what is in it
            try:
                with self.path.open("rb") as file:
                    digest, stat_behind = digest_of(file), os.fstat(file.fileno())
            except OSError as error:
                raise self.unreadable(error) from error
            if digest == self.digest and _version_of(stat_behind) == _version_of(stat):
                self._stat = _version_of(stat)
                return
        sizes = f"it had {self._stat[0]} bytes and has {stat.st_size}"
        if stat.st_size == self._stat[0]:
            sizes = f"it has as many bytes, {stat.st_size}, and was written since"
        msg = f"{self.url} has changed since its index was made: {sizes}; begin again, and it is made again"
        raise ChangedFileError(msg)

    def read(self, index: int) -> bytes:
        """Return the bytes of a sample.

        Raises:
            LoaderError: The file has changed, or is gone, since its index was made.
        """
        start, stop = self.span(index)
        data = self._read_at(start, stop)
        if len(data) != stop - start:
            end = start + len(data)
            msg = f"{self.url} ends in sample {index}, byte {end}: it was cut off since its index was made"
            raise ChangedFileError(msg)
        # Behind the read: what is written after this look is not in it.
        self._check(os.fstat(self._descriptor()))
        return data

    def read_several(self, indices: Sequence[int]) -> list[bytes]:
        """Return the bytes of samples; those that lie one behind the other are read at once.

        Raises:
            LoaderError: As of :meth:`read`.
        """
        self.span(0)  # opens the offsets
        offsets = self._offsets
        samples = [b""] * len(indices)
        order = sorted([(offsets[i], offsets[i + 1], place) for place, i in enumerate(indices)])
        first, count, pread = 0, len(order), os.pread
        while first < count:
            start, stop, _ = order[first]
            last = first + 1
            while last < count and order[last][0] <= stop + _GAP_NBYTES and stop < start + CHUNK_NBYTES:
                stop, last = order[last][1], last + 1
            try:  # with nothing around it: reading a short line takes a microsecond
                data = pread(_open[self._key], stop - start, start)
            except (KeyError, OSError):
                data = self._read_at(start, stop)
            if len(data) != stop - start:
                return [self.read(index) for index in indices]  # it names the sample that is cut off
            for begin, end, place in order[first:last]:
                samples[place] = data[begin - start : end - start]
            first = last
        self._check(os.fstat(self._descriptor()))
        return samples

    def check(self) -> None:
        """Check that the file is what it was when its index was made.

        Raises:
            LoaderError: It has changed, or is gone.
        """
        try:
            stat = retry_read(self.path.stat)
        except OSError as error:
            raise self.unreadable(error) from error
        self._check(stat)

    def where(self, index: int) -> str:
        """Return the file and the place of a sample in it, for messages."""
        return f"{self.url}, sample {index}, byte {self.span(index)[0]}"


class _ZstdFile:
    """A file with zstd's frames, decompressed.

    The library's own reader takes a file that is cut off for one that has ended, and samples would be lost.
    """

    def __init__(self, file: Any) -> None:
        from zstandard import ZstdDecompressor

        self._file = file
        self._decompressor = ZstdDecompressor(max_window_size=_WINDOW_NBYTES)
        self._frame: Any = None  # the one that has begun
        self._unread = b""  # what was read behind its end

    def read(self, nbytes: int) -> bytes:
        """Return some bytes, about this many before they are decompressed; none at the end.

        Raises:
            EOFError: The file ends within a frame.
            OSError: It is no such file.
        """
        import zstandard

        while data := self._unread or self._file.read(nbytes):
            self._frame = self._frame or self._decompressor.decompressobj()
            try:
                decompressed: bytes = self._frame.decompress(data)
            except zstandard.ZstdError as error:
                raise OSError(str(error)) from error
            self._unread = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
            if decompressed:
                return decompressed
        if self._frame is not None:
            msg = "the file ends within a frame of zstd"
            raise EOFError(msg)
        return b""

    def seek(self, position: int) -> None:
        """Skip this many decompressed bytes, of a file that was just opened."""
        while position > 0:
            skipped = self.read(min(position, CHUNK_NBYTES))
            position -= len(skipped)
            if position < 0 or not skipped:
                msg = "the file has changed since its beginning was read"
                raise OSError(msg)

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _parse_header(head: bytes) -> dict[str, Any] | None:
    """Return the header of an index; ``None`` for one that was damaged, or is another program's."""
    try:
        header = json.loads(head)
    except (ValueError, RecursionError):
        return None
    kinds = {"version": list, "stat": list, "samples": int, "digest": str, "left_out": int}
    is_whole = (
        isinstance(header, dict)
        and header.get("format") == _FORMAT
        and all(type(header.get(name)) is kind for name, kind in kinds.items())
        and [type(value) for value in header["stat"]] == [int, int, int]
    )
    return header if is_whole else None


def _version_of(stat: os.stat_result) -> list[Any]:
    """Return what changes when a file is written; its last time also where a program sets back the others."""
    return [stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns]


def _write(part: Path, *data: bytes) -> None:
    with part.open("wb") as file:
        file.writelines(data)


def index_files(files: Sequence[str], kind: str, access: Access) -> list[IndexedFile]:
    """Return files with their indexes; those that are missing are made in parallel."""
    if len(files) == 1:
        return [IndexedFile(files[0], kind, access)]
    with ThreadPoolExecutor(min(len(files), max(2, available_cores()))) as pool:
        return list(pool.map(lambda url: IndexedFile(url, kind, access), files))
