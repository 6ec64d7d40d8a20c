"""Scans of files: where samples begin in lines and tars, and what makes a file one that has none.

A scan reads a file once, to its end, and refuses what a reader of single samples would lose or cut: so no
run ends for it in the middle of an epoch.
"""

import codecs
import hashlib
import json
import os
import re
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray
from tp_core.errors import LoaderError
from tp_core.output import get_logger

log = get_logger("tp_data")

CHUNK_NBYTES = 1 << 23  # that are read at once
_BLOCK_NBYTES = 512  # of a tar
_META = re.compile(r"__[^/]*__($|/)")  # as WebDataset has it
_LINE_END = ord("\n")
_BLANKS = np.frombuffer(b" \t\n\v\f\r", np.uint8)


class FileScan(NamedTuple):
    """What the scan of a file gives: where samples begin, with the end of the last, and a digest."""

    offsets: NDArray[np.uint64]
    digest: str
    left_out: int = 0  # members of a tar


def digest_of(file: BinaryIO) -> str:
    """Return a digest of what is left of a file."""
    digest = hashlib.blake2b(digest_size=8)
    while chunk := file.read(CHUNK_NBYTES):
        digest.update(chunk)
    return digest.hexdigest()


def _scan_lines(path: Path, url: str, *, is_json: bool) -> FileScan:
    """Return the beginnings of the lines of a file; in one of JSON, lines of blanks are none.

    Raises:
        LoaderError: It has no lines that can be read by themselves: UTF-16, or one value over all lines.
    """
    digest, size = hashlib.blake2b(digest_size=8), 0
    parts: list[NDArray[np.uint64]] = []
    firsts: list[NDArray[np.uint8]] = []  # the first byte of each line
    begins_line = True
    with path.open("rb") as file:
        mark = file.read(len(codecs.BOM_UTF8))
        file.seek(0)
        while chunk := file.read(CHUNK_NBYTES):
            digest.update(chunk)
            data = np.frombuffer(chunk, np.uint8)
            begins = np.flatnonzero(data[:-1] == _LINE_END) + 1
            if begins_line:
                begins = np.append(0, begins)
            parts.append(begins.astype(np.uint64) + np.uint64(size))
            firsts.append(data[begins])
            begins_line = bool(data[-1] == _LINE_END)
            size += len(chunk)
        starts = np.concatenate([*parts, np.zeros(0, np.uint64)])
        first = np.concatenate([*firsts, np.zeros(0, np.uint8)])
        if mark == codecs.BOM_UTF8:
            starts[0] = len(mark)
            first[:1] = np.frombuffer(os.pread(file.fileno(), 1, len(mark)) or b"\n", np.uint8)
            if size == len(mark):
                starts, first = starts[1:], first[1:]
        ends = np.append(starts[1:], np.uint64(size))
        if is_json:
            keep = np.ones(len(starts), bool)
            for i in np.flatnonzero(np.isin(first, _BLANKS)):
                keep[i] = bool(os.pread(file.fileno(), int(ends[i] - starts[i]), int(starts[i])).strip())
            starts, ends = starts[keep], ends[keep]
        if len(starts):
            nbytes = min(int(ends[0] - starts[0]), CHUNK_NBYTES)  # one line may be a whole file
            line = os.pread(file.fileno(), nbytes, int(starts[0]))
            _check_first_line(line, url, is_json=is_json, is_only=len(starts) == 1)
    return FileScan(np.append(starts, np.uint64(size)), digest.hexdigest())


def _check_first_line(line: bytes, url: str, *, is_json: bool, is_only: bool) -> None:
    """Check that a file has lines, by its first one.

    Raises:
        LoaderError: It has none; the message says how to make some.
    """
    is_array_file = is_only and ".json" in Path(url.partition("?")[0]).suffixes
    if line.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)) or b"\0" in line[:4]:
        why = "it is UTF-16 or UTF-32, or no text; write it as UTF-8: iconv -f UTF-16 -t UTF-8"
    elif is_only and b"\r" in line.rstrip(b"\r\n"):
        why = "its lines end in '\\r' alone; write them with '\\n': tr '\\r' '\\n'"
    elif is_json and is_array_file and line.lstrip().startswith(b"["):
        why = "it is one array; write one value in each line: jq -c '.[]'"
    elif is_json and len(line) < CHUNK_NBYTES and _ends_within_value(line):
        why = (
            "its first line ends within a value, as it is one document over several lines; write one value "
            "in each line: jq -c '.[]' of an array, jq -c . of others"
        )
    else:
        return
    msg = f"{url} has no lines to read one by one: {why}"
    raise LoaderError(msg)


def _ends_within_value(line: bytes) -> bool:
    """Return whether a line is the beginning of an array or object, which the next line continues."""
    text = line.decode(errors="replace").strip()
    if not text.startswith(("[", "{")):
        return False
    try:
        json.loads(text)
    except ValueError as error:
        return getattr(error, "pos", 0) >= len(text)
    return False


def _scan_tar(path: Path, url: str) -> FileScan:
    """Return the beginnings of the samples of a tar: neighbors with names that begin alike, to the first dot.

    Raises:
        LoaderError: The tar is cut off, or is none; or its members are no samples.
    """
    starts: list[int] = []
    left_out: list[str] = []
    names: set[int] = set()  # as hashes: a tar may have millions
    keys: set[int] = set()
    last, end = "", 0
    try:
        with tarfile.open(path, "r:") as tar:
            for member in tar:
                key, extension = tar_key(member.name)
                is_content = member.isfile() or member.issym() or member.islnk()
                if not member.isdir() and not (extension and is_content):
                    left_out.append(member.name)
                elif not member.isdir():
                    if why := _unfit_member(member, names, keys, last):
                        msg = f"{url}, byte {member.offset}: {why}"
                        raise LoaderError(msg)
                    if key != last:
                        starts.append(member.offset)
                        last = key
                end = tar.offset  # behind it
                tar.members = []  # type: ignore[attr-defined]  # it would keep them all
    except tarfile.TarError as error:
        msg = f"{url} is no whole tar: {error}, behind sample {len(starts)}, byte {end}"
        raise LoaderError(msg) from error
    size = path.stat().st_size
    with path.open("rb") as file:
        digest = digest_of(file)
        file.seek(min(end, size))
        mark = file.read(_BLOCK_NBYTES)
        if size < end or len(mark) < _BLOCK_NBYTES:
            msg = f"{url} is no whole tar: it ends at byte {size}, in or behind sample {len(starts) - 1}"
            raise LoaderError(msg)
        if mark.strip(b"\0"):
            msg = f"{url} is no whole tar: byte {end}, behind sample {len(starts) - 1}, begins no member"
            raise LoaderError(msg)
        while rest := file.read(CHUNK_NBYTES):
            if rest.strip(b"\0"):
                msg = (
                    f"{url} goes on behind its end, byte {end}, as archives do that were joined: what is "
                    "there would be lost; give the archives one by one, or join them with tar --concatenate"
                )
                raise LoaderError(msg)
    if left_out:
        log.warning(
            "%s: %d members are in no sample, such as %r: others have a name, a dot and an extension",
            url,
            len(left_out),
            left_out[0],
        )
    return FileScan(np.array([*starts, end], np.uint64), digest, len(left_out))


def _unfit_member(member: tarfile.TarInfo, names: set[int], keys: set[int], last: str) -> str:
    """Return why a member can be in no sample, or nothing, and note its name.

    Args:
        member: The member.
        names: The hashes of names of those before.
        keys: The hashes of keys of those before.
        last: The key of the one before.
    """
    key, extension = tar_key(member.name)
    is_again, is_apart = hash((key, extension)) in names, key != last and hash(key) in keys
    names.add(hash((key, extension)))
    keys.add(hash(key))
    if is_again:
        return (
            f"{member.name!r} is the second {extension!r} of its sample; write the archive with one of them"
        )
    if is_apart:
        return (
            f"{member.name!r} does not stand beside the other members of its sample; write the archive by "
            "names: tar --sort=name"
        )
    if not member.isfile():
        return (
            f"{member.name!r} is a link to {member.linkname!r}, and a sample has the content of its members; "
            "write the archive with tar --dereference --hard-dereference"
        )
    return ""


def _scan_parquet(path: Path, url: str) -> FileScan:
    """Return a digest of a file that has its own index.

    Raises:
        LoaderError: It is several files, joined.
    """
    digest, size, tail = hashlib.blake2b(digest_size=8), 0, b""
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_NBYTES):
            digest.update(chunk)
            # The end of a file, and the beginning of another one. The index is of the last one alone.
            if (at := (tail + chunk).find(b"PAR1PAR1")) >= 0:
                end = size - len(tail) + at + 4
                msg = (
                    f"{url} is several Parquet files, joined at byte {end}: all rows but those of the last "
                    "would be lost; give each file by itself"
                )
                raise LoaderError(msg)
            tail = chunk[-7:]
            size += len(chunk)
    return FileScan(np.array([0, size], np.uint64), digest.hexdigest())


def tar_key(name: str) -> tuple[str, str]:
    """Return the key of a member of a tar, and what it is in its sample; nothing for one that is in none.

    By WebDataset's rule the key ends at the first dot behind the folder, and names such as ``__meta__/a.txt``
    are in no sample. Nor are files of systems that begin with a dot, in whatever folder.

    Example:
        >>> tar_key("train/0001.seg.png"), tar_key("train/._0001.png")
        (('train/0001', 'seg.png'), ('', ''))
    """
    folder, _, base = name.rpartition("/")
    stem, _, extension = base.partition(".")
    if not stem or not extension or _META.match(name):
        return "", ""
    if folder:
        stem = f"{folder}/{stem}"
    return stem, extension.lower()


SCANS: dict[str, Callable[[Path, str], FileScan]] = {
    "lines": lambda path, url: _scan_lines(path, url, is_json=False),
    "json": lambda path, url: _scan_lines(path, url, is_json=True),
    "tar": _scan_tar,
    "parquet": _scan_parquet,
}
