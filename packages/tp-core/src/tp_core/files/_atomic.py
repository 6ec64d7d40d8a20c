"""Atomic writes: a file is complete or absent.

No lock is needed. Two processes that write one file at once each write a temporary file of their own; the
process that ends last wins.
"""

import contextlib
import errno
import os
import re
import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

_RANDOM_BYTES = 8


def write_atomically(
    write: Callable[[Path], None], path: str | os.PathLike[str], *, mode: int = 0o666
) -> None:
    """Call ``write`` with a temporary file next to ``path``, flush it to the disk, and rename it to ``path``.

    The file gets the permissions of the user's new files, or less with ``mode``. The next process that
    writes to ``path`` deletes temporary files of processes that were killed.

    Raises:
        OSError: The folder does not exist, the disk is full, or writing is not allowed.

    Example:
        >>> write_atomically(lambda part: part.write_text("42"), "answer.txt")  # doctest: +SKIP
    """
    with atomic_part(path, mode=mode) as part:
        write(part)


@contextmanager
def atomic_part(path: str | os.PathLike[str], *, mode: int = 0o666) -> Iterator[Path]:
    """Yield the temporary file that replaces ``path`` after the block; see ``write_atomically``."""
    path = Path(path)
    if path.is_dir():
        msg = f"{path} is a folder; give the name of a file in it"
        raise IsADirectoryError(errno.EISDIR, msg)
    check_folder_of(path)
    _delete_abandoned(path)
    with _new_part(path, mode) as part:
        try:
            with showing_system_errors(path):
                yield part
                # Before the rename: after a power failure the new name could stand on an empty file.
                with part.open("rb") as file:
                    os.fsync(file.fileno())
            part.replace(path)
        except BaseException:
            part.unlink(missing_ok=True)
            raise
    sync_folder(path.parent)  # without it a power failure could undo the rename


def check_folder_of(path: Path) -> None:
    """Make sure that there is a folder for a file: errors of the system name the temporary file."""
    if not path.parent.is_dir():
        msg = f"there is no folder {path.parent} in which {path.name} could be written"
        raise FileNotFoundError(errno.ENOENT, msg)


@contextmanager
def showing_system_errors(path: Path) -> Iterator[None]:
    """Raise the system's error, with its file, where a library has replaced it by its own.

    On a full disk the archive of ``torch.save`` cannot be finished: a ``RuntimeError`` about positions then
    follows the ``OSError`` and often hides it. safetensors raises its own exception, with the number only
    in its text: "File too large (os error 27)".
    """
    try:
        yield
    except Exception as error:
        system_error = _system_error(error)
        if system_error is None:
            raise
        if system_error.errno is not None and system_error.filename is None:
            system_error.filename = os.fspath(path)
        if system_error is error:
            raise
        raise system_error from error


def _system_error(error: Exception) -> OSError | None:
    """Return the system's error behind an exception: itself, or the cause of torch's or safetensors' own.

    Other exceptions stay as they are: they may come from a user's code that produces the data.
    """
    cause: BaseException | None = error
    if re.search("inline_container|PytorchStreamWriter", str(error)):
        while cause is not None and not isinstance(cause, OSError):
            cause = cause.__cause__ or cause.__context__
    elif type(error).__name__ == "SafetensorError":
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            return None
        return OSError(int(number[1]), os.strerror(int(number[1])))
    if isinstance(cause, OSError):
        return cause
    return None


def sync_folder(folder: Path) -> None:
    """Flush new names in ``folder`` to the disk, where the system can: fsync of a file does not do it."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


@contextmanager
def _new_part(path: Path, mode: int) -> Iterator[Path]:
    """Make an empty temporary file next to ``path``, locked while this process writes it.

    The lock is how another process knows that its writer lives; see `_delete_abandoned`.
    """
    while True:
        part = path.with_name(f".{path.name}.{secrets.token_hex(_RANDOM_BYTES)}.tmp")
        # os.open, so that the system applies the umask: reading the umask means setting it for all threads.
        handle = os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        with os.fdopen(handle, "wb") as file:
            if not _lock(handle, wait=True):
                file.close()  # there is no lock to keep, and some systems cannot rename open files
            elif not part.exists():  # another process deleted it before it was locked
                continue
            yield part
            return


def _delete_abandoned(path: Path) -> None:
    """Delete the temporary files of ``path`` that are not locked: their writers were killed."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{{2 * _RANDOM_BYTES}}}\.tmp")
    with contextlib.suppress(OSError):  # no folder: making the new part raises
        for part in [Path(entry) for entry in os.scandir(path.parent) if pattern.fullmatch(entry.name)]:
            with contextlib.suppress(OSError):  # deleted in between, or another user's
                handle = os.open(part, os.O_RDWR)
                try:
                    if _lock(handle, wait=False):
                        part.unlink()
                finally:
                    os.close(handle)


def _lock(handle: int, *, wait: bool) -> bool:
    """Lock an open file for this process, and return whether it is locked: some file systems cannot.

    Never on Windows: no other handle could write to a locked file there, nor rename it.
    """
    if os.name == "nt":
        return False
    from filelock import lock_descriptor

    try:
        return lock_descriptor(handle, blocking=wait)
    except OSError:
        return False
