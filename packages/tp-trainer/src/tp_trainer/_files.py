"""Files that are whole or not there."""

import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tp_core.errors import StateError

__all__ = ["load_state", "save_atomically", "sync_folder", "write_atomically"]


def save_atomically(state: Any, path: str | os.PathLike[str]) -> None:
    """Write ``state`` with ``torch.save``; a crash at any moment leaves the old file as it was.

    Raises:
        OSError: The folder does not exist, the disk is full, or writing is not allowed.
    """

    def write(part: Path) -> None:
        with part.open("wb") as file:
            torch.save(state, file)

    write_atomically(write, path)


def write_atomically(write: Callable[[Path], None], path: str | os.PathLike[str]) -> None:
    """Let ``write`` fill a file beside ``path``, bring it onto the disk, and give it that name.

    Raises:
        OSError: The folder does not exist, the disk is full, or writing is not allowed.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    os.close(handle)
    part = Path(name)
    try:
        write(part)
        with part.open("rb") as file:
            os.fsync(file.fileno())
        # mkstemp made it private; the user's umask decides for the final file.
        umask = os.umask(0)
        os.umask(umask)
        part.chmod(0o666 & ~umask)
        part.replace(path)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Bring the new name itself onto the disk, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def load_state(path: str | os.PathLike[str], *, mapped: bool = False) -> Mapping[str, Any]:
    """Read what ``torch.save`` wrote, onto the CPU or mapped; foreign code is never run.

    Raises:
        OSError: There is no such file, or it may not be read.
        StateError: It is damaged, or holds something else than tensors and plain values.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
    except OSError:
        raise
    except Exception as error:  # torch says "not a file of mine" in a dozen ways
        msg = f"{Path(path)} cannot be read as saved state: {error}"
        raise StateError(msg) from error
    if not isinstance(state, Mapping):
        msg = f"{Path(path)} holds {type(state).__name__}, and a state is a dict of tensors"
        raise StateError(msg)
    return state
