"""The folder of a run with its checkpoints: each is whole or not there, and known to be what was written.

A checkpoint is written into a folder with another name, brought onto the disk, and renamed. Its
manifest has the size and the digest of every file, so that what was cut off or changed later
is found before anything of it is used::

    run/.step-0000000010.1f3a9c07.tmp   being written, under a name of its own
    run/step-0000000010                 a checkpoint
    run/step-0000000010.damaged         one that is not what was written; nothing deletes it
    run/.step-0000000010.old            being deleted
"""

import contextlib
import logging
import math
import os
import re
import secrets
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from tp_core.errors import StateError
from tp_core.internal import INDEX, read_digests, records_of, sync_folder
from tp_core.plugins import Session
from tp_core.state import DIGEST_SIZE, FileRecord, digest_of, from_json, record_of, to_json

log = logging.getLogger("tp_trainer")

MANIFEST = "manifest.json"
FORMAT = 3  # of the manifest; files of another one are refused

PREFIX = "step-"
DIGITS = 10  # so that names sort as their steps do

Signature = tuple[tuple[str, int, int, int, int], ...]


class RunFolder:
    """The folder with the checkpoints of one run.

    Args:
        path: Where it is; it need not be there yet. A relative one is taken from where the process
            stands now.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path).absolute()
        self._seen_whole: dict[Path, Signature] = {}

    def committed(self) -> list[Path]:
        """Return the checkpoints, the newest first."""
        pattern = f"{PREFIX}{'[0-9]' * DIGITS}"
        return sorted(self.path.glob(pattern), reverse=True) if self.path.is_dir() else []

    # -- writing --------------------------------------------------------------------------------

    def sweep(self) -> None:
        """Delete what runs have left that ended while they wrote or deleted."""
        for ending in ("tmp", "old"):
            for path in self.path.glob(f".{PREFIX}*.{ending}"):
                delete(path)

    def scratch(self, step: int) -> Path:
        """Return a new folder to write the checkpoint of ``step`` into."""
        path = self.path / f".{name_of(step)}.{secrets.token_hex(4)}.tmp"
        path.mkdir(parents=True)
        return path

    def commit(
        self, written: Path, facts: Mapping[str, Any], known: Mapping[str, FileRecord] | None = None
    ) -> Path:
        """Add the manifest to a written folder, bring all of it onto the disk, give it its name.

        Args:
            written: What :meth:`scratch` returned, with the files in it.
            facts: What the manifest says besides the files.
            known: The files that are on the disk already, with their digests.

        Raises:
            OSError: The disk is full, or writing is not allowed.
        """
        files = dict(known or {})
        found = sorted(written.rglob("*"))
        paths = [p for p in found if not p.is_dir() and str(p.relative_to(written)) not in files]
        with ThreadPoolExecutor(1) as beside:  # the disk has its time while the processors have theirs
            syncing = [beside.submit(sync_file, path) for path in paths]
            files |= {str(path.relative_to(written)): record_of(path) for path in paths}
            for sync in syncing:
                sync.result()
        final = self.path / written.name.removeprefix(".").split(".")[0]
        sync_file(write_manifest(written, step_of(final), facts, files))
        for path in (written, *(path for path in found if path.is_dir())):
            sync_folder(path)
        if os.path.lexists(final):  # this run has not written it
            log.warning("%s is in the way of a checkpoint; it is now %s", final, self._set_aside(final))
        written.rename(final)
        sync_folder(self.path)
        self._seen_whole[final] = _signature(final)
        return final

    def prune(
        self, written: Path, *, keep: int, best: str | None = None, mode: Literal["min", "max"] = "min"
    ) -> None:
        """Delete all checkpoints but the newest ones that are whole, and the best.

        Damaged ones that are met are set aside: none of them is kept in the place of a good one.

        Args:
            written: The one that was just written, which is kept.
            keep: How many of the newest are kept.
            best: The metric that decides which one is the best, if one is kept.
            mode: Whether its "min" or its "max" is the best.
        """
        kept = [written]
        for path in self.committed():
            if len(kept) == keep:
                break
            if path != written and self._is_whole(path):
                kept.append(path)
        if best is not None:
            kept += self._best(best, 1.0 if mode == "min" else -1.0)
        for path in self.committed():
            if path not in kept:
                self._remove(path)

    def _best(self, metric: str, sign: float) -> list[Path]:
        """Return the whole checkpoint whose metric is the best, the newest of equals, if there is one."""
        found: list[tuple[float, Path]] = []
        for path in self.committed():
            try:
                value = read_manifest(path).metrics.get(metric)
            except StateError as error:
                self._on_damage(path, error)
                continue
            if isinstance(value, int | float) and not math.isnan(value):
                found.append((sign * value, path))
        found.sort(key=lambda pair: pair[0])  # stable: the newest of equals stays the first
        return next(([path] for _, path in found if self._is_whole(path)), [])

    def _is_whole(self, path: Path) -> bool:
        """Whether a checkpoint is what was written; one that is not is set aside."""
        try:
            self._check(path)
        except StateError as error:
            self._on_damage(path, error)
            return False
        return True

    def _check(self, path: Path) -> None:
        """Verify a checkpoint, once: later, files with the same sizes and times are taken for the same.

        Raises:
            StateError: The checkpoint is not what was written.
        """
        now = _signature(path)
        if self._seen_whole.get(path) != now:
            verify(path)
            self._seen_whole[path] = now

    def _on_damage(self, path: Path, error: StateError) -> None:
        """Set a damaged checkpoint aside, and name it in the log."""
        try:
            log.warning("%s; it does not count any more and is now %s", error, self._set_aside(path))
        except OSError as failure:
            log.warning("%s; it could not be moved aside: %s", error, failure)

    def _set_aside(self, path: Path) -> Path:
        """Give another name to what is in the place of a checkpoint, and return it."""
        self._seen_whole.pop(path, None)
        aside, number = path.with_name(f"{path.name}.damaged"), 1
        while os.path.lexists(aside):
            number += 1
            aside = path.with_name(f"{path.name}.damaged-{number}")
        path.rename(aside)
        return aside

    def _remove(self, path: Path) -> None:
        """Delete a checkpoint; a process that is killed meanwhile leaves none that is half there."""
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
        """Return the newest checkpoint that is whole; the damaged ones are set aside, and named in the log.

        Args:
            session: Whose ranks share the work, if all of them call this.

        Raises:
            FormatError: The newest one is of a format that this version does not read.

        Collectives: with a session one broadcast, and for each checkpoint those of :func:`verify`.
        """
        found = self.committed()
        if session is not None:
            found = session.broadcast(found)
        is_main = session is None or session.is_main
        damaged = 0
        for path in found:
            try:
                verify(path, session)
            except FormatError:
                raise
            except StateError as error:
                damaged += 1
                if is_main:
                    self._on_damage(path, error)
                continue
            if is_main:
                self._seen_whole[path] = _signature(path)
            if is_main and damaged:
                log.warning("the run goes on from %s, which is whole", path)
            return path
        if is_main and damaged:
            log.warning(
                "%s had %d checkpoints and none is whole: the run begins anew, from its first step",
                self.path,
                damaged,
            )
        return None


def _signature(path: Path) -> Signature:
    """Return what the system says of each file: another one after every change."""
    found = [(file, file.lstat()) for file in sorted(path.rglob("*"))]
    return tuple((str(f), s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for f, s in found)


# -- Verifying: names of folders, manifest, and the digest of every file --------------------------


_READERS = 4  # files that are checked at one time
_NAME = re.compile(rf"{PREFIX}[0-9]{{{DIGITS}}}")
_OF_RANK = re.compile(r"__([0-9]+)_[^/]*")


def name_of(step: int) -> str:
    """Return the name of the folder with the checkpoint of a step."""
    return f"{PREFIX}{step:0{DIGITS}d}"


def step_of(path: Path) -> int:
    """Return the step that a checkpoint stands at."""
    return int(path.name.removeprefix(PREFIX))


def verify(path: Path, session: Session | None = None) -> None:
    """Make sure that a checkpoint is what was written.

    Args:
        path: The checkpoint of a run, or a folder of ``tp_shard.save_sharded``.
        session: Whose ranks share the work, if all of them call this: rank 0 reads the manifest, and each
            rank that sees the folder digests the files that were written by the rank of its number.

    Raises:
        FormatError: The checkpoint is of another version's format; on all ranks.
        StateError: A file is missing, cut off or changed, or it has the name of another checkpoint; on all
            ranks.

    Collectives: with a session one broadcast and two gathers of small objects.
    """
    if session is None or session.world_size == 1:
        problem = _problem_in(path, _files_of(path))
    else:
        problem = _problem_of_all(path, session)
    if problem is not None:
        msg = f"checkpoint {path} is damaged: {problem}"
        raise StateError(msg)


def _problem_of_all(path: Path, session: Session) -> str | None:
    files: Mapping[str, FileRecord] = {}
    failure: tuple[type[StateError], str] | None = None
    if session.is_main:
        try:
            files = _files_of(path)
        except StateError as error:
            failure = (type(error), str(error))
    files, failure = session.broadcast((files, failure))
    if failure is not None:
        kind, text = failure
        raise kind(text)
    # A host without the folder, or without xxhash, has nothing to say of it; reading will tell.
    can_read = path.is_dir() and all(file.can_be_checked for file in files.values())
    seen = session.gather_objects(session.is_main or can_read)
    readers = [rank for rank, sees in enumerate(seen) if sees]
    mine = {n: f for n, f in files.items() if readers[_writer_of(n) % len(readers)] == session.rank}
    return next(filter(None, session.gather_objects(_problem_in(path, mine))), None)


def _writer_of(name: str) -> int:
    """Return the rank that has written a file: the one of its number reads it, and finds it in memory."""
    found = _OF_RANK.fullmatch(name.rpartition("/")[2])
    return 0 if found is None else int(found[1])


def _files_of(path: Path) -> Mapping[str, FileRecord]:
    """Return the files of a checkpoint.

    Raises:
        FormatError: The checkpoint is of another version's format.
        StateError: The manifest is not what was written, or that of another checkpoint.
    """
    if (path / INDEX).is_file():
        return read_digests(path)
    manifest = read_manifest(path)
    if _NAME.fullmatch(path.name) and step_of(path) != manifest.step:
        msg = f"checkpoint {path} is damaged: {MANIFEST} is that of step {manifest.step}"
        raise StateError(msg)
    return manifest.files


def _problem_in(path: Path, files: Mapping[str, FileRecord]) -> str | None:
    """Return which of the files is not what was written, and how it differs."""
    # Digests are made outside of the interpreter's lock.
    with ThreadPoolExecutor(_READERS) as pool:
        problems = pool.map(lambda name: files[name].difference(path / name), files)
        found = dict(zip(files, problems, strict=True))
    return next((f"{name} {problem}" for name, problem in found.items() if problem is not None), None)


# -- The manifest: the step, the files with their digests, and the digest of the manifest itself --
#
# Its first key is the digest of the whole text, computed with zeros in its place, so that no byte of it
# can change unnoticed: what decides which checkpoint is the best, or the newest, is known to be what was
# written.


_ZEROS = b"0" * (2 * DIGEST_SIZE)
_HEAD = re.compile(rb'\{\n "blake2b": "([0-9a-f]{%d})",\n' % len(_ZEROS))


class FormatError(StateError):
    """A checkpoint that is whole, and of a format that this version does not read."""


@dataclass(frozen=True, slots=True)
class Manifest:
    """The contents of a manifest.

    Attributes:
        step: The optimizer step it stands at.
        metrics: What decides which checkpoint is the best, by name.
        files: Its files, by their path in it.
    """

    step: int
    metrics: Mapping[str, Any]
    files: Mapping[str, FileRecord]


def write_manifest(
    folder: Path, step: int, facts: Mapping[str, Any], files: Mapping[str, FileRecord]
) -> Path:
    """Write the manifest of the checkpoint in ``folder``, and return its path.

    Args:
        folder: Where the checkpoint is written.
        step: The optimizer step it stands at.
        facts: What it says besides, for people and for "metrics".
        files: Its files, by their path in it.

    Raises:
        OSError: The disk is full, or writing is not allowed.
        StateError: A fact is not a plain value.
    """
    listed = {name: file.to_dict() for name, file in files.items()}
    values = {"metrics": {}, **facts, "format": FORMAT, "step": step, "files": listed}
    text = to_json(MANIFEST, {"blake2b": _ZEROS.decode(), **values}, indent=1).encode()
    path = folder / MANIFEST
    path.write_bytes(text.replace(_ZEROS, digest_of([text]).encode(), 1))
    return path


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of the checkpoint in ``folder``.

    Raises:
        FormatError: The checkpoint is of another version's format, or this process lacks what its digests
            are made by.
        StateError: The manifest is missing, or is not what was written.
    """
    path = folder / MANIFEST
    try:
        if not path.is_file():  # a link to nowhere, a pipe that would never end
            lack = f"has no {MANIFEST}" if folder.exists() else "is not there"
            msg = f"{folder} is not a checkpoint: it {lack}"
            raise StateError(msg)
        data = path.read_bytes()
    except OSError as error:
        msg = f"checkpoint {folder} is damaged: {MANIFEST} cannot be read: {error}"
        raise StateError(msg) from error
    head = _HEAD.match(data)
    if head is None or head[1].decode() != digest_of((data[: head.start(1)], _ZEROS, data[head.end(1) :])):
        msg = f"checkpoint {folder} is damaged: {MANIFEST} is not what was written"
        raise StateError(msg)
    try:
        values = from_json(data.decode())
        if values["format"] != FORMAT:
            msg = (
                f"{folder} has format {values['format']!r}, and this tp-trainer reads {FORMAT}: go on with "
                "the version that wrote it, or give another folder"
            )
            raise FormatError(msg)
        files = records_of(values["files"], path)
        return Manifest(values["step"], dict(values["metrics"]), files)
    except FormatError:
        raise
    except StateError as error:
        raise FormatError(str(error)) from error
    except (AttributeError, KeyError, TypeError, ValueError) as error:  # somebody made it himself
        msg = f"{path} is not a manifest: {error!r}"
        raise StateError(msg) from error


# -- Files: plain values as JSON, bytes brought onto the disk, things deleted ---------------------


def bytes_in(folder: Path) -> int:
    """Return how many bytes the files of a folder have now, while others write, rename and delete there."""
    total = 0
    for place, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += Path(place, name).stat().st_size
    return total


def write_json(path: Path, value: Any) -> None:
    """Write plain values.

    Raises:
        StateError: ``value`` holds something that is not a plain value.
    """
    path.write_text(to_json(path.name, value))


def read_json(path: Path) -> Any:
    """Read what :func:`write_json` wrote.

    Raises:
        StateError: The file is missing or damaged.
    """
    try:
        return from_json(path.read_text())
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read: {error}"
        raise StateError(msg) from error


def sync_file(path: Path) -> None:
    """Bring the bytes of a file onto the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def delete(path: Path) -> None:
    """Delete a folder, or whatever else has its name, if there is something.

    What cannot be deleted is named in the log: it costs room on the disk, and the run goes on.
    """
    try:
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif os.path.lexists(path):
            path.unlink()
    except FileNotFoundError:  # somebody else has deleted it
        return
    except OSError as error:
        log.warning("%s could not be deleted: %s", path, error)
