"""Files that are whole or not there."""

import contextlib
import os
import re
import secrets
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["sync_folder", "write_atomically"]

_RANDOM_BYTES = 8


def write_atomically(write: Callable[[Path], None], path: str | os.PathLike[str]) -> None:
    """Let ``write`` fill a file next to ``path``, flush it to the disk, and rename it to ``path``.

    The file gets the permissions of the user's new files. What a process that was killed meanwhile has
    left next to ``path`` is deleted by the next one that writes there.

    Raises:
        OSError: The folder does not exist, the disk is full, or writing is not allowed.

    Example:
        >>> write_atomically(lambda part: part.write_text("42"), "answer.txt")  # doctest: +SKIP
    """
    path = Path(path)
    _delete_abandoned(path)
    with _new_part(path) as part:
        try:
            write(part)
            with part.open("rb") as file:
                os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)


def sync_folder(folder: Path) -> None:
    """Flush new names in ``folder`` to the disk, where the system can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _new_part(path: Path) -> Iterator[Path]:
    """Make an empty file next to ``path``, locked as long as this process writes it."""
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(_RANDOM_BYTES)}.tmp")
        # The system applies the umask here: reading it would mean to change it for all threads.
        handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666)
        with os.fdopen(handle, "wb") as file:
            if not _lock(handle, wait=True):
                file.close()  # there is no lock to keep, and some systems rename no open files
            elif not part.exists():  # another process found it before it was locked
                continue
            yield part
            return


def _delete_abandoned(path: Path) -> None:
    """Delete the parts of ``path`` that are not locked: their writers were killed."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}\.tmp")
    with contextlib.suppress(OSError):  # no folder: making the new part raises
        for part in [Path(entry) for entry in os.scandir(path.parent) if pattern.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):  # deleted meanwhile, or another user's
                handle = os.open(part, os.O_RDWR)
                try:
                    if _lock(handle, wait=False):
                        part.unlink()
                finally:
                    os.close(handle)


if sys.platform != "win32":
    import fcntl

    def _lock(handle: int, *, wait: bool) -> bool:
        """Lock an open file for this process, and return whether it is: some file systems cannot."""
        try:
            fcntl.flock(handle, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True

else:

    def _lock(handle: int, *, wait: bool) -> bool:  # noqa: ARG001 - the other system's arguments
        """Return False, as this system has no such locks."""
        return False
