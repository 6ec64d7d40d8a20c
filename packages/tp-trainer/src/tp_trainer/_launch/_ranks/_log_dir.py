"""The temporary directory of a launch, for the logs of its ranks; those of killed launches are removed."""

import os
import shutil
import stat
import tempfile
from pathlib import Path

__all__ = ["TemporaryLogs"]

_PREFIX = "tp-launch-"
_LOCK = "lock"


class TemporaryLogs:
    """A directory of this launch, which others leave alone for as long as this process lives.

    Attributes:
        path: Where it is.
    """

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        if os.name == "posix":
            _clear(base)
        draft = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base))
        self._lock = _lock(draft, create=True)
        self.path = draft.rename(base / draft.name.removeprefix("."))

    def remove(self) -> None:
        """Remove it."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _clear(base: Path) -> None:
    """Remove the directories of this user whose launches were killed: the locks of those went with them."""
    for path in base.glob(f"{_PREFIX}*"):
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            lock = _lock(path, create=False)
        except OSError:
            continue  # its launch is alive, or somebody else has just removed it
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(directory: Path, *, create: bool) -> int | None:
    """Lock a directory for as long as the descriptor is open.

    Raises:
        OSError: Another process has locked the directory, or it has no lock.
    """
    if os.name != "posix":
        return None
    import fcntl

    flags = os.O_RDWR | os.O_NOFOLLOW | (os.O_CREAT if create else 0)
    descriptor = os.open(directory / _LOCK, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        if not create:
            raise
        return None  # a file system without locks: nobody can lock it, and nobody clears it away
    return descriptor
