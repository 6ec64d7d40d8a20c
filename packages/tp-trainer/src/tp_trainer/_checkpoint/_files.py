"""Files of a checkpoint: plain values as JSON, bytes brought onto the disk, things deleted."""

import contextlib
import logging
import os
import shutil
from pathlib import Path
from typing import Any

from tp_core.errors import StateError
from tp_core.state import from_json, to_json

__all__ = ["bytes_in", "delete", "read_json", "sync_file", "write_json"]

log = logging.getLogger("tp_trainer")


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
