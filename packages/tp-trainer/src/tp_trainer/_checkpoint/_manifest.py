"""The manifest of a checkpoint: what it stands at, its files with their digests, and its own digest.

Its first key is the digest of the whole text, computed with zeros in its place, so that no byte of it
can change unnoticed: what decides which checkpoint is the best, or the newest, is known to be what was
written.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tp_core.errors import StateError
from tp_core.internal import records_of
from tp_core.state import DIGEST_SIZE, FileRecord, digest_of, from_json, to_json

__all__ = [
    "DIGEST_SIZE",
    "FORMAT",
    "MANIFEST",
    "FileRecord",
    "FormatError",
    "Manifest",
    "read_manifest",
    "write_manifest",
]

MANIFEST = "manifest.json"
FORMAT = 3

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
