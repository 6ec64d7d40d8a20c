"""Locks on the folders and files that a run writes over time: one process at a time owns a place.

The lock is the system's (``flock``; ``LockFileEx`` on Windows), on a file beside the place. The file's text
about the owner is for people only. So a process that dies in any way leaves its places free, and a lock
file without a lock has no owner. The lock belongs to the open file, which forked processes inherit. They
close it at once: a data loader's worker may survive a killed process, and must not keep the folder from the
next run. Executed programs never get it.

On a file system without locks, a second file exists while the place has an owner. If a dead process of this
host left it, it is taken over, by the process's id and start time. The owner on another host may be alive,
so its file stays.

An atomic write needs no lock: see :func:`write_atomically`.
"""

import contextlib
import errno
import json
import os
import socket
import stat
import threading
import time
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Self

from tp_core.errors import ConfigError
from tp_core.files._atomic import check_folder_of
from tp_core.output import get_logger

if TYPE_CHECKING:
    from filelock import SoftFileLock

log = get_logger("tp_core")

GRACE_S = 3.0  # a killed process takes a moment to free its memory, and only then its files
_INTERVAL_S = 0.05

_held: dict[int, "Ownership"] = {}  # by descriptor, of this process
# Held while a descriptor enters or leaves `_held`, and around each fork: a child that is forked in between
# would keep a lock that it does not know of. Reentrant, as a signal's handler may fork within such a block.
_forking = threading.RLock()


class Ownership:
    """The exclusive right to write to a place, which a process has until it releases it or dies.

    Args:
        place: A folder, which is made if it does not exist, or a file in an existing folder.
        is_folder: Whether it is a folder. A folder's lock is the file ".lock" in it, a file's is beside it.
        run: The name of the run in the lock file. In this process, an owner of the same run that was never
            closed gives way.
        leaves_file: Whether the lock file stays, so that others can read the run.
        grace_s: The seconds to wait for an owner that ends; 3 by default.

    Raises:
        ConfigError: Another process has the place.
        OSError: The folder or the lock file cannot be made, or the lock file is a link.
    """

    def __init__(
        self,
        place: Path,
        *,
        is_folder: bool = False,
        run: str | None = None,
        leaves_file: bool = False,
        grace_s: float | None = None,
    ) -> None:
        self._place, self._is_folder = place, is_folder
        self._run, self._leaves_file = run, leaves_file
        self._grace_s = grace_s
        self._file = lock_file_of(place, is_folder=is_folder)
        self._marker_file = self._file.with_name(f"{self._file.name}.owner")
        self._pid = os.getpid()
        self._descriptor: int | None = None
        self._marker: SoftFileLock | None = None
        _close_in_forked_copies()
        self._acquire()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def is_held(self) -> bool:
        """Return whether the lock file is still the one that was locked, and not deleted or replaced."""
        descriptor = self._descriptor
        return descriptor is not None and _is_at(descriptor, self._file)

    def release(self) -> None:
        """Release the place for others; calling it again does nothing."""
        if os.getpid() != self._pid:  # a forked copy must not delete the file of its parent
            return
        if not self._leaves_file and self.is_held():
            with contextlib.suppress(OSError):  # harmless without a lock, and Windows deletes no open file
                self._file.unlink()
        self._close()

    def renew(self) -> None:
        """Lock the place again after it, or the lock file, was deleted.

        Raises:
            ConfigError: Another process has taken the place in between.
            OSError: The folder or the lock file cannot be made.
        """
        self._close()
        self._acquire()

    def _acquire(self) -> None:
        if self._is_folder:  # made here, as its lock file lies in it
            try:
                self._place.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                msg = f"{self._place} cannot be made, or is no folder: {error.strerror}"
                raise OSError(error.errno, msg) from None
        else:
            check_folder_of(self._place)
        self._pid = os.getpid()
        grace_s = GRACE_S if self._grace_s is None else self._grace_s
        deadline = time.monotonic() + grace_s
        while not self._try():
            if time.monotonic() > deadline:
                raise ConfigError(self._refusal())
            time.sleep(_INTERVAL_S)

    def _refusal(self) -> str:
        kind = "folder" if self._is_folder else "file"
        if self._marker_file.exists():
            lock = self._marker_file
        else:
            lock = self._file
        return (
            f"{self._place} is in use: {_holder(self._file)}. It belongs to one run at a time: wait for the "
            f"end of that run, or give another {kind}. Only if it was lost together with its host, delete "
            f"{lock}"
        )

    def _try(self) -> bool:
        """Try once to get the lock, and write the owner to its file."""
        from filelock import lock_descriptor  # here: it takes 9 ms, which imports of tp_core need not

        with _forking:
            descriptor = self._descriptor = _open(self._file)
            _held[descriptor] = self
        try:
            try:
                is_locked = lock_descriptor(descriptor, blocking=False)
            except OSError as error:
                is_locked = self._try_marker(error)
            # The last owner may have deleted the file since it was opened: a lock on it excludes nobody.
            if is_locked and _is_at(descriptor, self._file):
                owner = {"pid": self._pid, "host": socket.gethostname(), "since": _now(), "run": self._run}
                os.ftruncate(descriptor, 0)
                # Text from the second byte on: Windows locks the first, and nobody else can read it.
                os.write(descriptor, b" " + json.dumps(owner).encode())
                return True
        except BaseException:  # a full disk, or Ctrl-C: the place must not stay locked
            self._close()
            raise
        self._close()
        if not is_locked and self._run is not None:
            for other in _held_at(self._file):
                if other._run == self._run:
                    other._close()
        return False

    def _try_marker(self, reason: OSError) -> bool:
        """Try once to get the place on a file system without locks, by a file that exists as long."""
        from filelock import SoftFileLock, Timeout

        marker = SoftFileLock(self._marker_file, timeout=0, thread_local=False)
        try:
            marker.acquire()
        except Timeout:
            return False
        self._marker = marker
        log.warning(
            "the file system of %s has no locks (%s): %s says who writes there; if another host has left it "
            "and died, delete it",
            self._place,
            reason,
            self._marker_file,
        )
        return True

    def _close(self) -> None:
        with _forking:
            descriptor, self._descriptor = self._descriptor, None
            marker, self._marker = self._marker, None
            if descriptor is not None:
                _held.pop(descriptor, None)
                os.close(descriptor)
        if marker is not None:
            marker.release()


def lock_file_of(place: Path, *, is_folder: bool = False) -> Path:
    """Return the lock file of a place, the same for every link to the place."""
    if is_folder:
        return place / ".lock"
    place = Path(os.path.realpath(place))
    return place.with_name(f".{place.name}.lock")


def run_in(file: Path) -> str | None:
    """Return the run in a lock file: the last one that wrote there."""
    run = _owner(file).get("run")
    if isinstance(run, str):
        return run
    return None


def _open(file: Path) -> int:
    """Open a lock file, and refuse links and other kinds of files: its content is overwritten."""
    # O_NOFOLLOW: another user of the folder could place a link, and have any file of this user overwritten.
    # O_NONBLOCK: opening a pipe of that name must not hang. Windows has neither.
    flags = os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    is_link = os.name == "nt" and file.is_symlink()
    descriptor = -1
    try:
        if not is_link:
            descriptor = os.open(file, flags, 0o666)
    except OSError as error:
        is_link = error.errno in {errno.ELOOP, errno.EMLINK}
        if not is_link:
            raise
    if descriptor >= 0:
        status = os.fstat(descriptor)
        if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:  # 0: it was deleted since
            return descriptor
        os.close(descriptor)
    if is_link:
        what = "a link"
    else:
        what = "another file's second name, or no file"
    msg = f"{file} is {what}, and tp would overwrite it as its lock: delete it"
    raise OSError(errno.ELOOP, msg)


def _owner(file: Path) -> dict[str, object]:
    try:
        with file.open("rb", buffering=0) as opened:
            opened.seek(1)
            owner = json.loads(opened.read(10_000))
    except (OSError, ValueError, RecursionError):
        return {}
    if isinstance(owner, dict):
        return owner
    return {}


def _holder(file: Path) -> str:
    """Return the owner of a lock in words, as far as the file names it."""
    owner = _owner(file)
    if not owner.keys() >= {"pid", "host", "since"}:
        return "another process writes there"
    # Not by the process id: in containers many processes have id 1 on hosts of one name.
    process = " (this process)" if _held_at(file) else ""
    return f"process {owner['pid']}{process} on host {owner['host']} writes there since {owner['since']}"


def _held_at(file: Path) -> list[Ownership]:
    return [owner for descriptor, owner in tuple(_held.items()) if _is_at(descriptor, file)]


def _now() -> str:
    return datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")


def _is_at(descriptor: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except OSError:
        return False


@cache
def _close_in_forked_copies() -> None:
    if hasattr(os, "register_at_fork"):  # Windows has no forks
        os.register_at_fork(
            before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_after_in_child
        )


def _after_in_child() -> None:
    _forking.release()
    for descriptor, owner in _held.items():
        os.close(descriptor)  # without unlocking, which would release the parent's lock
        owner._descriptor = None  # another file may soon have the same descriptor
    _held.clear()
