"""The folder of a run's checkpoints: each one is complete or absent, and verified before use.

A checkpoint is written into a folder with a temporary name, synced to the disk, and renamed. Its manifest has
the size and the digest of every file, so truncation and changes are found before anything is used::

    run/.step-0000000010.1f3a9c07.tmp   being written, under a name of its own
    run/step-0000000010                 a checkpoint
    run/step-0000000010.damaged         one that failed its verification; nothing deletes it
    run/.step-0000000010.old            being deleted
"""

import contextlib
import math
import os
import re
import secrets
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar, cast

from tp_core.errors import StateError
from tp_core.files import is_absence, is_regular_file, retry_read, sync_folder
from tp_core.output import get_logger
from tp_core.plugins import Session
from tp_core.state import DIGEST_SIZE, FileRecord, digest_of, from_json, record_of, to_json
from tp_core.tensors import INDEX, read_digests

log = get_logger("tp_trainer")

MANIFEST = "manifest.json"
STATE = "state.json"
"""The plain values of a run that are equal on all ranks."""
FORMAT = 3  # of the manifest; other formats are refused

PREFIX = "step-"
DIGITS = 10  # a fixed width: names sort in the order of steps

Signature = tuple[tuple[str, int, int, int, int], ...]

T = TypeVar("T")


class RunFolder:
    """The folder with the checkpoints of one run, which need not exist yet."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._seen_whole: dict[Path, _Verified] = {}

    def committed(self) -> list[Path]:
        """Return the committed checkpoints, newest first; none where there is no folder.

        Raises:
            OSError: The folder could not be read for some seconds.
        """
        try:
            # Not by glob, which takes a folder that cannot be read for an empty one.
            paths = retry_read(lambda: list(self.path.iterdir()))
        except OSError as error:
            if is_absence(error):
                return []
            raise
        return sorted((path for path in paths if _NAME.fullmatch(path.name)), reverse=True)

    # -- writing --------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Delete the leftovers of runs that were killed during a write or a deletion."""
        for ending in ("tmp", "old"):
            for path in self.path.glob(f".{PREFIX}*.{ending}"):
                delete(path)

    def scratch(self, step: int) -> Path:
        path = self.path / f".{name_of(step)}.{secrets.token_hex(4)}.tmp"
        path.mkdir(parents=True)
        return path

    def commit(
        self, written: Path, facts: Mapping[str, Any], known: Mapping[str, FileRecord] | None = None
    ) -> Path:
        """Add the manifest to a written folder, sync all of it to the disk, and rename it."""
        files = dict(known or {})
        entries = sorted(written.rglob("*"))
        paths = [p for p in entries if not p.is_dir() and str(p.relative_to(written)) not in files]
        with ThreadPoolExecutor(1) as beside:  # the disk syncs while the processor computes digests
            syncing = [beside.submit(sync_file, path) for path in paths]
            files |= {str(path.relative_to(written)): record_of(path) for path in paths}
            for sync in syncing:
                sync.result()
        final = self.path / written.name.removeprefix(".").split(".")[0]
        sync_file(write_manifest(written, step_of(final), facts, files))
        for path in (written, *(path for path in entries if path.is_dir())):
            sync_folder(path)  # before the rename: after a power loss a name must not precede its contents
        if os.path.lexists(final):  # not of this run
            log.warning("%s is in the way of a checkpoint; it is now %s", final, self._set_aside(final))
        written.rename(final)
        sync_folder(self.path)
        self._seen_whole[final] = _Verified(_signature(final), facts.get("metrics", {}))
        return final

    def prune(
        self, written: Path, *, keep: int, best: str | None = None, mode: Literal["min", "max"] = "min"
    ) -> None:
        """Delete all checkpoints but the newest whole ones, and the best.

        Damaged ones are set aside, so that none takes the place of a whole one. Where one cannot be read,
        nothing is deleted: the next call looks again.
        """
        try:
            checkpoints = self.committed()
            kept = [written]
            for path in checkpoints:
                if len(kept) == keep:
                    break
                if path != written and self._is_whole(path):
                    kept.append(path)
            if best is not None:
                sign = 1.0 if mode == "min" else -1.0
                kept += self._best(checkpoints, best, sign)
        except OSError as error:
            log.warning("%s; no checkpoint is deleted until it can be read", error)
            return
        for path in checkpoints:
            if path not in kept and os.path.lexists(path):
                self._remove(path)

    def _best(self, paths: list[Path], metric: str, sign: float) -> list[Path]:
        """Return the whole checkpoint with the best value of a metric, the newest of equals, if any."""
        scored: list[tuple[float, Path]] = []
        for path in paths:
            try:
                value = self._metrics_of(path).get(metric)
            except StateError as error:
                if os.path.lexists(path):  # not set aside yet
                    self._on_damage(path, error)
                continue
            if isinstance(value, int | float) and not math.isnan(value):
                scored.append((sign * value, path))
        scored.sort(key=lambda pair: pair[0])  # stable: the newest of equals stays the first
        return next(([path] for _, path in scored if self._is_whole(path)), [])

    def _metrics_of(self, path: Path) -> Mapping[str, Any]:
        """Return the metrics of a checkpoint; of a manifest that was verified, from memory."""
        seen, manifest = self._seen_whole.get(path), path / MANIFEST
        if seen is not None and os.path.lexists(manifest):
            now = _described(os.fspath(manifest), manifest.lstat())
            if now in seen.signature:
                return seen.metrics
        return read_manifest(path).metrics

    def _is_whole(self, path: Path) -> bool:
        """Return whether a checkpoint passes verification; set it aside if not.

        Files with unchanged sizes and times count as verified.

        Raises:
            OSError: It cannot be read.
        """
        seen, now = self._seen_whole.get(path), _signature(path)
        if seen is not None and seen.signature == now:
            return True
        try:
            verify(path)
            self._seen_whole[path] = _Verified(now, read_manifest(path).metrics)
        except StateError as error:
            self._on_damage(path, error)
            return False
        return True

    def _on_damage(self, path: Path, error: StateError) -> None:
        try:
            log.warning("%s; it does not count any more and is now %s", error, self._set_aside(path))
        except OSError as failure:
            log.warning("%s; it could not be moved aside: %s", error, failure)

    def _set_aside(self, path: Path) -> Path:
        """Rename whatever has the name of a checkpoint, and return the new path."""
        self._seen_whole.pop(path, None)
        aside, number = path.with_name(f"{path.name}.damaged"), 1
        while os.path.lexists(aside):
            number += 1
            aside = path.with_name(f"{path.name}.damaged-{number}")
        path.rename(aside)
        return aside

    def _remove(self, path: Path) -> None:
        """Delete a checkpoint: rename it first, so that a kill in between leaves no incomplete one."""
        self._seen_whole.pop(path, None)
        old = path.with_name(f".{path.name}.old")
        delete(old)
        try:
            path.rename(old)
        except OSError as error:
            log.warning("%s could not be deleted: %s", path, error)
        else:
            delete(old)

    # -- reading --------------------------------------------------------------------------------

    def newest_whole(self, session: Session | None = None) -> Path | None:
        """Return the newest whole checkpoint, if there is any; set damaged ones aside, and log them.

        All ranks of a session must call this, and share the work.

        Raises:
            OSError: The folder or a checkpoint could not be read for some seconds; nothing was changed.
            StateError: There are checkpoints, and none is whole; nothing was changed.

        Collectives: with a session one broadcast, then as in :func:`verify` for each checkpoint.
        """
        checkpoints = on_first_rank(session, self.committed, where="checkpoints of a run")
        is_main = session is None or session.is_main
        damaged: dict[Path, StateError] = {}
        for path in checkpoints:
            try:
                verify(path, session)
            except FormatError:
                raise
            except StateError as error:
                damaged[path] = error
                continue
            if is_main:
                # Only now: where none is whole, the next start must see all that this one has seen.
                for other, problem in damaged.items():
                    self._on_damage(other, problem)
                if damaged:
                    log.warning("the run resumes from %s, which is whole", path)
                with contextlib.suppress(OSError, StateError):  # then it is verified once more
                    self._seen_whole[path] = _Verified(_signature(path), read_manifest(path).metrics)
            return path
        if damaged:
            problems = "; ".join(map(str, damaged.values()))
            msg = (
                f"{self.path} has {len(damaged)} checkpoints and none is whole ({problems}). Nothing was "
                "changed, and the run does not begin again by itself: put back what they were, or, to begin "
                "again, delete them or give another folder"
            )
            raise StateError(msg)
        return None


def _described(path: str, s: os.stat_result) -> tuple[str, int, int, int, int]:
    return path, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns


class _Verified(NamedTuple):
    """A checkpoint that was whole: its files as they were then, and its metrics."""

    signature: Signature
    metrics: Mapping[str, Any]


def _signature(path: Path) -> Signature:
    """Return inode, size and times of each file, which differ after every change."""
    # By `os.scandir`: a save looks at all files of all kept checkpoints, and `rglob` takes much longer.
    described = []
    folders = [os.fspath(path)]
    while folders:
        try:
            with os.scandir(folders.pop()) as entries:
                for entry in entries:
                    described.append(_described(entry.path, entry.stat(follow_symlinks=False)))
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
        except OSError as error:
            if not is_absence(error):
                raise
    return tuple(sorted(described))


# -- Verification: names of folders, manifest, and the digest of every file -----------------------


_READERS = 4  # files that are checked at the same time
_NAME = re.compile(rf"{PREFIX}[0-9]{{{DIGITS}}}")
_OF_RANK = re.compile(r"__([0-9]+)_[^/]*")


def name_of(step: int) -> str:
    return f"{PREFIX}{step:0{DIGITS}d}"


def step_of(path: Path) -> int:
    return int(path.name.removeprefix(PREFIX))


def verify(path: Path, session: Session | None = None) -> None:
    """Make sure that a checkpoint, or a folder of ``tp_shard.save_sharded``, is as it was written.

    All ranks of a session must call this. Rank 0 reads the manifest; each rank that sees the folder digests
    the files that its rank number has written.

    Raises:
        FormatError: The checkpoint has another version's format; on all ranks.
        OSError: A file could not be read for some seconds; on all ranks. The checkpoint may be whole.
        StateError: A file is missing, cut off or changed, or it has the name of another checkpoint; on all
            ranks.

    Collectives: with a session one broadcast and two gathers of small objects.
    """
    files = on_first_rank(session, lambda: _files_of(path), where="files of a checkpoint")
    if session is None or session.world_size == 1:
        problem = _problem_in(path, files)
    else:
        problem = _problem_of_all(path, files, session)
    if problem is not None:
        msg = f"checkpoint {path} is damaged: {problem}"
        raise StateError(msg)


def on_first_rank(session: Session | None, look: Callable[[], T], *, where: str) -> T:
    """Return what rank 0 sees, on all ranks; its error is raised on all of them.

    Collectives: one broadcast, with several ranks.
    """
    if session is None or session.world_size == 1:
        return look()
    seen: T | None = None
    failure: OSError | StateError | None = None
    if session.is_main:
        try:
            seen = look()
        except (OSError, StateError) as error:
            failure = error
    seen, failure = session.broadcast((seen, failure), where=where)
    if failure is not None:
        raise failure
    return cast("T", seen)


def _problem_of_all(path: Path, files: Mapping[str, FileRecord], session: Session) -> str | None:
    # A host without the folder checks nothing; if it must read the folder, that raises.
    seen = session.gather_objects(session.is_main or _is_there(path), where="readers of a checkpoint")
    readers = [rank for rank, sees in enumerate(seen) if sees]
    own_files = {n: f for n, f in files.items() if readers[_writer_of(n) % len(readers)] == session.rank}
    problem: str | None = None
    failure: OSError | None = None
    try:
        problem = _problem_in(path, own_files)
    except OSError as error:
        failure = error
    answers = session.gather_objects((problem, failure), where="problems of a checkpoint")
    for _, failed in answers:
        if failed is not None:
            raise failed
    return next((problem for problem, _ in answers if problem is not None), None)


def _is_there(path: Path) -> bool:
    """Return whether this host sees a folder; one that it sees and cannot read is named when it is read."""
    try:
        path.stat()
    except OSError as error:
        return not is_absence(error)
    return True


def _writer_of(name: str) -> int:
    """Return the rank that wrote a file. The same rank checks it, as its host may have it in page cache."""
    match = _OF_RANK.fullmatch(name.rpartition("/")[2])
    if match is None:
        return 0
    return int(match[1])


def _files_of(path: Path) -> Mapping[str, FileRecord]:
    try:
        if retry_read(lambda: is_regular_file(path / INDEX)):
            return read_digests(path)
        manifest = read_manifest(path)
    except OSError as error:
        raise _not_readable(path, error) from error
    if _NAME.fullmatch(path.name) and step_of(path) != manifest.step:
        msg = f"checkpoint {path} is damaged: its {MANIFEST} is from step {manifest.step}"
        raise StateError(msg)
    return manifest.files


def _problem_in(path: Path, files: Mapping[str, FileRecord]) -> str | None:
    """Return the first file that differs from its record, and how.

    Raises:
        OSError: A file could not be read for some seconds.
    """
    # Threads are enough: digests are computed without the GIL.
    with ThreadPoolExecutor(_READERS) as pool:
        problems = pool.map(lambda name: files[name].difference(path / name), files)
        try:
            problem_of = dict(zip(files, problems, strict=True))
        except OSError as error:
            raise _not_readable(path, error) from error
    return next((f"{name} {problem}" for name, problem in problem_of.items() if problem is not None), None)


# -- The manifest: the step, the files with their digests, and the digest of the manifest itself --
#
# Its first key is the digest of the whole text, computed with zeros in its place. So no byte of it can change
# unnoticed, not even the metric that decides which checkpoint is the best.


_ZEROS = b"0" * (2 * DIGEST_SIZE)
_HEAD = re.compile(rb'\{\n "blake2b": "([0-9a-f]{%d})",\n' % len(_ZEROS))


class FormatError(StateError):
    """Raised for a whole checkpoint in a format that this version does not read."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a manifest."""

    step: int
    metrics: Mapping[str, Any]
    files: Mapping[str, FileRecord]


def write_manifest(
    folder: Path, step: int, facts: Mapping[str, Any], files: Mapping[str, FileRecord]
) -> Path:
    listed = {name: file.to_dict() for name, file in files.items()}
    values = {"metrics": {}, **facts, "format": FORMAT, "step": step, "files": listed}
    text = to_json(MANIFEST, {"blake2b": _ZEROS.decode(), **values}, indent=1).encode()
    path = folder / MANIFEST
    path.write_bytes(text.replace(_ZEROS, digest_of([text]).encode(), 1))
    return path


def _not_readable(path: Path, error: OSError) -> OSError:
    reason = f"checkpoint {path} cannot be read, and nothing was changed: {error}"
    if error.errno is None:
        return OSError(reason)
    return OSError(error.errno, reason)


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a checkpoint.

    Raises:
        FormatError: It has another version's format.
        OSError: It could not be read for some seconds.
        StateError: There is none, or it is damaged.
    """
    path = folder / MANIFEST
    data: bytes | None = None
    try:
        # Also refuses a dangling link, and a pipe, which would block.
        data = retry_read(lambda: path.read_bytes() if is_regular_file(path) else None)
    except OSError as error:
        if not is_absence(error):
            raise
    if data is None:
        if os.path.lexists(folder):
            lack = f"has no {MANIFEST}"
        else:
            lack = "is not there"
        msg = f"{folder} is not a checkpoint: it {lack}"
        raise StateError(msg)
    head = _HEAD.match(data)
    if head is None or head[1].decode() != digest_of((data[: head.start(1)], _ZEROS, data[head.end(1) :])):
        msg = f"checkpoint {folder} is damaged: {MANIFEST} is not what was written"
        raise StateError(msg)
    try:
        values = from_json(data.decode())
        if values["format"] != FORMAT:
            msg = (
                f"{folder} has format {values['format']!r}, and this tp-trainer reads {FORMAT}: use "
                "the version that wrote it, or give another folder"
            )
            raise FormatError(msg)
        files = {str(name): FileRecord(**record) for name, record in values["files"].items()}
        return Manifest(values["step"], dict(values["metrics"]), files)
    except FormatError:
        raise
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # not written by this package
        msg = f"{path} is not a manifest: {error!r}"
        raise StateError(msg) from error


# -- Files: JSON, syncs and deletions -------------------------------------------------------------


def bytes_in(folder: Path) -> int:
    """Return the bytes of a folder's files, while others may write, rename and delete there."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(place, name).stat().st_size
    return total


def write_json(path: Path, value: Any) -> None:
    path.write_text(to_json(path.name, value))


def read_json(path: Path) -> Any:
    try:
        return from_json(retry_read(path.read_text))
    except (FileNotFoundError, ValueError) as error:
        msg = f"{path} cannot be read: {error}"
        raise StateError(msg) from error


def sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def delete(path: Path) -> None:
    """Delete a folder, or whatever else has its name, if it exists.

    A failure is logged and not raised: it costs disk space, and need not end the run.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            path.unlink()
    except FileNotFoundError:  # another process has deleted it
        return
    except OSError as error:
        log.warning("%s could not be deleted: %s", path, error)
