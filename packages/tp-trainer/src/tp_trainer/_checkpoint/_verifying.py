"""Whether a checkpoint is what was written: names of folders, manifest, and the digest of every file."""

import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tp_core.errors import StateError
from tp_core.internal import INDEX, read_digests
from tp_core.plugins import Session
from tp_core.state import FileRecord

from tp_trainer._checkpoint._manifest import MANIFEST, read_manifest

__all__ = ["DIGITS", "PREFIX", "name_of", "step_of", "verify"]

PREFIX = "step-"
DIGITS = 10
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
