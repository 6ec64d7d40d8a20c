"""A folder is one run's at a time: a locked file in it, which the system frees when the process dies.

The lock is one of ``flock``. It belongs to the open file, which forked copies of the process inherit:
they close it at once (a data loader's worker may outlive a process that was killed, and must not keep
the folder from the run that is started next), and programs that are executed never get it.
"""

import contextlib
import fcntl
import json
import logging
import os
import socket
import threading
import time
from datetime import datetime
from functools import cache
from pathlib import Path

from tp_core.errors import ConfigError

__all__ = ["FolderLock"]

log = logging.getLogger("tp_trainer")

FILE = ".lock"
GRACE_S = 3.0  # a process that was killed takes a moment to give its memory back, and then its files
_INTERVAL_S = 0.05

_descriptors: set[int] = set()
_forking = threading.Lock()


class FolderLock:
    """The right to write checkpoints into a folder.

    Args:
        folder: Which; it is made if it is not there.

    Raises:
        ConfigError: Another run has locked the folder.
        OSError: The folder or the file cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file = folder / FILE
        self._pid = os.getpid()
        self._descriptor: int | None = None
        _close_in_forked_copies()
        self._acquire()

    def is_held(self) -> bool:
        """Whether the folder is still the one that was locked: people delete folders."""
        if self._descriptor is None:
            return self._folder.is_dir()
        return _is_at(self._descriptor, self._file)

    def release(self) -> None:
        """Release the folder for other runs; calling it again does nothing."""
        if self._descriptor is None or os.getpid() != self._pid:
            return
        if self.is_held():
            with contextlib.suppress(OSError):  # it says nothing to whoever comes next
                self._file.unlink()
        self._close()

    def renew(self) -> None:
        """Lock the folder again after it, or the file in it, was deleted.

        Raises:
            ConfigError: Another run has locked the folder meanwhile.
            OSError: The folder or the file cannot be made.
        """
        self._close()
        self._acquire()

    def _acquire(self) -> None:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            msg = f"{self._folder} cannot be made, or is no folder for checkpoints: {error.strerror}"
            raise OSError(error.errno, msg) from None
        deadline = time.monotonic() + GRACE_S
        while not self._try():
            if time.monotonic() > deadline:
                msg = (
                    f"{self._folder} is in use: {_holder(self._file)}. A folder holds the checkpoints of "
                    "one run at a time: wait for the end of that run, or give another folder. Only if it "
                    f"was lost together with its host, delete {self._file}"
                )
                raise ConfigError(msg)
            time.sleep(_INTERVAL_S)

    def _try(self) -> bool:
        """Try once to get the lock; where the file system has none, say so and count it as got."""
        with _forking:
            descriptor = self._descriptor = os.open(self._file, os.O_RDWR | os.O_CREAT, 0o666)
            _descriptors.add(descriptor)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            self._close()
            return False
        except OSError as error:
            self._close()
            self._file.unlink(missing_ok=True)
            log.warning(
                "the file system of %s has no locks (%s): a second run in this folder will not be noticed",
                self._folder,
                error,
            )
            return True
        if not _is_at(descriptor, self._file):  # whoever had it has deleted it since
            self._close()
            return False
        try:
            owner = {"pid": self._pid, "host": socket.gethostname(), "since": _now()}
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps(owner).encode())
        except OSError:  # a full disk
            self._close()
            raise
        return True

    def _close(self) -> None:
        if self._descriptor is not None:
            with _forking:
                _descriptors.discard(self._descriptor)
                os.close(self._descriptor)
            self._descriptor = None


def _holder(file: Path) -> str:
    """Return who has the lock, as far as the file says."""
    try:
        owner = json.loads(file.read_text())
        pid, host, since = int(owner["pid"]), str(owner["host"]), str(owner["since"])
    except (OSError, KeyError, TypeError, ValueError):
        return "another process writes its checkpoints there"
    # Not by the number: in containers many processes are number 1 of hosts with one name.
    here = " (this process)" if any(_is_at(descriptor, file) for descriptor in tuple(_descriptors)) else ""
    return f"process {pid}{here} on host {host} writes its checkpoints there since {since}"


def _now() -> str:
    return datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


@cache
def _close_in_forked_copies() -> None:
    os.register_at_fork(
        before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_after_in_child
    )


def _after_in_child() -> None:
    _forking.release()
    for descriptor in _descriptors:
        os.close(descriptor)  # without unlocking: the lock is that of the process which goes on
    _descriptors.clear()
