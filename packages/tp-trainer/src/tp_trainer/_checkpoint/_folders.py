"""Folders with a manifest: whole or not there, and known to be what was written.

A checkpoint is written into a folder with another name, brought onto the disk, and renamed. Its
manifest has the size and the BLAKE2b digest of every file, so that what was cut off or changed
later is found before anything of it is used.
"""

import hashlib
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tp_core.errors import StateError

from tp_trainer._checkpoint._plain import from_json, to_json
from tp_trainer._files import sync_folder

__all__ = [
    "commit",
    "committed",
    "newest_whole",
    "prune",
    "read_json",
    "scratch",
    "step_of",
    "verify",
    "write_json",
]

log = logging.getLogger("tp_trainer")

MANIFEST = "manifest.json"
FORMAT = 1

_PREFIX = "step-"
_DIGITS = 10
_CHUNK = 1 << 20


def scratch(folder: Path, step: int) -> Path:
    """Return a new folder to write the checkpoint of ``step`` into."""
    path = folder / f".{_PREFIX}{step:0{_DIGITS}d}.tmp"
    shutil.rmtree(path, ignore_errors=True)  # of a run that ended while it wrote
    path.mkdir(parents=True)
    return path


def commit(written: Path, facts: Mapping[str, Any]) -> Path:
    """Add the manifest to a written folder, bring all of it onto the disk, give it its name.

    Args:
        written: What :func:`scratch` returned, with the files in it.
        facts: What the manifest says besides the files.

    Raises:
        OSError: The disk is full, or writing is not allowed.
    """
    folders, listed = [written], {}
    for path in sorted(written.rglob("*")):
        if path.is_dir():
            folders.append(path)
            continue
        digest, nbytes = _digest(path)
        listed[str(path.relative_to(written))] = {"nbytes": nbytes, "blake2b": digest}
        _sync_file(path)
    write_json(written / MANIFEST, {"format": FORMAT, **facts, "files": listed}, indent=1)
    _sync_file(written / MANIFEST)
    for path in folders:
        sync_folder(path)
    final = written.with_name(written.name.removeprefix(".").removesuffix(".tmp"))
    if final.exists():  # the same step of a run that was resumed from before it
        old = final.with_name(f".{final.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
        written.rename(final)
        shutil.rmtree(old, ignore_errors=True)
    else:
        written.rename(final)
    sync_folder(final.parent)
    return final


def committed(folder: Path) -> list[Path]:
    """Return the checkpoints in ``folder``, the newest first."""
    return sorted(folder.glob(f"{_PREFIX}{'[0-9]' * _DIGITS}"), reverse=True) if folder.is_dir() else []


def step_of(path: Path) -> int:
    """Return the step that a checkpoint stands at."""
    return int(path.name.removeprefix(_PREFIX))


def newest_whole(folder: Path) -> Path | None:
    """Return the newest checkpoint that is whole; the damaged ones before it are named in the log."""
    for path in committed(folder):
        try:
            verify(path)
        except StateError as error:
            log.warning("%s; the checkpoint before it is used", error)
            continue
        return path
    return None


def verify(path: Path) -> dict[str, Any]:
    """Make sure that a checkpoint is what was written, and return its manifest.

    Raises:
        StateError: A file is missing, cut off or changed, or the format is another one.
    """
    if not (path / MANIFEST).is_file():
        msg = f"{path} is no checkpoint: it has no {MANIFEST}"
        raise StateError(msg)
    manifest: dict[str, Any] = read_json(path / MANIFEST)
    if manifest.get("format") != FORMAT:
        msg = f"{path} has format {manifest.get('format')!r}, and this tp-trainer reads {FORMAT}"
        raise StateError(msg)
    for name, written in manifest["files"].items():
        file = path / name
        if not file.is_file():
            msg = f"checkpoint {path} is damaged: {name} is missing"
            raise StateError(msg)
        digest, nbytes = _digest(file)
        if nbytes != written["nbytes"]:
            msg = f"checkpoint {path} is damaged: {name} has {nbytes} bytes of {written['nbytes']}"
            raise StateError(msg)
        if digest != written["blake2b"]:
            msg = f"checkpoint {path} is damaged: {name} is not what was written"
            raise StateError(msg)
    return manifest


def prune(folder: Path, *, keep: int, best: Path | None) -> None:
    """Delete all checkpoints but the newest ``keep`` and the best."""
    for path in committed(folder)[keep:]:
        if path != best:
            shutil.rmtree(path, ignore_errors=True)
    for path in _leftovers(folder):
        shutil.rmtree(path, ignore_errors=True)


def _leftovers(folder: Path) -> Iterator[Path]:
    yield from folder.glob(f".{_PREFIX}*.old")


def write_json(path: Path, value: Any, *, indent: int | None = None) -> None:
    """Write plain values.

    Raises:
        StateError: There is something else in it.
    """
    path.write_text(to_json(path.name, value, indent=indent))


def read_json(path: Path) -> Any:
    """Read what :func:`write_json` wrote.

    Raises:
        StateError: It is not there, or it is damaged.
    """
    try:
        return from_json(path.read_text())
    except (OSError, ValueError) as error:
        msg = f"{path} cannot be read: {error}"
        raise StateError(msg) from error


def _digest(path: Path) -> tuple[str, int]:
    digest, nbytes = hashlib.blake2b(digest_size=16), 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            nbytes += len(chunk)
    return digest.hexdigest(), nbytes


def _sync_file(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())
