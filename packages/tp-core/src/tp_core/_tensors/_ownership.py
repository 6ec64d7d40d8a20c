"""What a program writes over time belongs to one process at a time: a locked file beside it says so.

The lock is the system's (``flock``; ``LockFileEx`` on Windows), and what the file says of the owner is for
people alone. So a process that dies, however it dies, leaves its places free, and a file that is left is
nobody's. The lock belongs to the open file, which forked copies of the process inherit: they close it at
once (a data loader's worker may outlive a process that was killed, and must not keep the folder from the run
that is started next), and programs that are executed never get it.

Where a file system has no locks, a second file stands there as long as the place has an owner. One that a
dead process of this host has left is taken over, by its number and the time of its start; one of another
host may be alive, and is left alone.

What is written at once, into a part that is renamed, needs no lock: see :func:`write_atomically`.
"""

import contextlib
import errno
import json
import logging
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

if TYPE_CHECKING:
    from filelock import SoftFileLock

log = logging.getLogger("tp_core")

GRACE_S = 3.0  # a process that was killed takes a moment to give its memory back, and then its files
_INTERVAL_S = 0.05

_held: dict[int, "Ownership"] = {}  # by descriptor, of this process
_forking = threading.RLock()  # a signal's handler may fork within a block of its thread


class Ownership:
    """The right to write to a place: one process has it until it gives it back, or dies.

    Args:
        place: A folder, which is made if it is not there, or a file, whose folder is there.
        is_folder: Whether it is a folder. Its lock is the file ".lock" in it, that of a file is beside it.
        run: What the lock file says of the run that writes to the place; a part of the same run in this
            process takes over from one that was never closed.
        leaves_file: Whether the lock file stays, for others to read the run.
        grace_s: How long to wait for an owner that ends; 3 seconds by default.

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
        """Whether the lock file is still the one that was locked: people delete folders, and fork."""
        descriptor = self._descriptor
        return descriptor is not None and _is_at(descriptor, self._file)

    def release(self) -> None:
        """Release the place for others; calling it again does nothing."""
        if os.getpid() != self._pid:
            return
        if not self._leaves_file and self.is_held():
            with contextlib.suppress(OSError):  # it says nothing to others, and Windows deletes no open file
                self._file.unlink()
        self._close()

    def renew(self) -> None:
        """Lock the place again after it, or the lock file, was deleted.

        Raises:
            ConfigError: Another process has the place meanwhile.
            OSError: The folder or the lock file cannot be made.
        """
        self._close()
        self._acquire()

    def _acquire(self) -> None:
        if self._is_folder:
            try:
                self._place.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                msg = f"{self._place} cannot be made, or is no folder: {error.strerror}"
                raise OSError(error.errno, msg) from None
        elif not self._file.parent.is_dir():
            msg = f"there is no folder {self._file.parent} in which {self._place.name} could be written"
            raise FileNotFoundError(errno.ENOENT, msg)
        self._pid = os.getpid()
        deadline = time.monotonic() + (GRACE_S if self._grace_s is None else self._grace_s)
        while not self._try():
            if time.monotonic() > deadline:
                raise ConfigError(self._refusal())
            time.sleep(_INTERVAL_S)

    def _refusal(self) -> str:
        kind = "folder" if self._is_folder else "file"
        lock = self._marker_file if self._marker_file.exists() else self._file
        return (
            f"{self._place} is in use: {_holder(self._file)}. It belongs to one run at a time: wait for the "
            f"end of that run, or give another {kind}. Only if it was lost together with its host, delete "
            f"{lock}"
        )

    def _try(self) -> bool:
        """Try once to get the lock, and say in its file who has it."""
        from filelock import lock_descriptor  # 9 ms, which importing tp_core need not take

        with _forking:
            descriptor = self._descriptor = _open(self._file)
            _held[descriptor] = self
        try:
            try:
                is_locked = lock_descriptor(descriptor, blocking=False)
            except OSError as error:
                is_locked = self._try_marker(error)
            # Whoever had it may have deleted it since: then it is nobody's, and another file is there.
            if is_locked and _is_at(descriptor, self._file):
                owner = {"pid": self._pid, "host": socket.gethostname(), "since": _now(), "run": self._run}
                os.ftruncate(descriptor, 0)
                # The first byte is the one that Windows locks: nobody else can read it there.
                os.write(descriptor, b" " + json.dumps(owner).encode())
                return True
        except BaseException:  # a full disk, or Ctrl-C
            self._close()
            raise
        self._close()
        if not is_locked and self._run is not None:
            for other in _held_at(self._file):
                if other._run == self._run:
                    other._close()
        return False

    def _try_marker(self, reason: OSError) -> bool:
        """Try once to get the place where the file system has no locks, by a file that exists meanwhile."""
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
    """Return the file whose lock a place has; a place has one, by whatever link it is reached."""
    if is_folder:
        return place / ".lock"
    place = Path(os.path.realpath(place))
    return place.with_name(f".{place.name}.lock")


def run_in(file: Path) -> str | None:
    """Return the run that a lock file names: the last one that has written there."""
    run = _owner(file).get("run")
    return run if isinstance(run, str) else None


def _open(file: Path) -> int:
    """Open a lock file, and nothing that only has its name: it is overwritten.

    Raises:
        OSError: It is a link, a second name of another file, or no file; or it cannot be made.
    """
    # O_NOFOLLOW: who may write to the folder could have any file of this user overwritten through a link.
    # O_NONBLOCK: a pipe of that name must not be waited for. Windows has neither.
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
    what = "a link" if is_link else "another file's second name, or no file"
    msg = f"{file} is {what}, and tp would overwrite it as its lock: delete it"
    raise OSError(errno.ELOOP, msg)


def _owner(file: Path) -> dict[str, object]:
    """Return what a lock file says, as far as it can be read."""
    try:
        with file.open("rb", buffering=0) as opened:
            opened.seek(1)
            owner = json.loads(opened.read(10_000))
    except (OSError, ValueError, RecursionError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _holder(file: Path) -> str:
    """Return who has the lock, as far as the file says."""
    owner = _owner(file)
    if not owner.keys() >= {"pid", "host", "since"}:
        return "another process writes there"
    # Not by the number: in containers many processes are number 1 of hosts with one name.
    here = " (this process)" if _held_at(file) else ""
    return f"process {owner['pid']}{here} on host {owner['host']} writes there since {owner['since']}"


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
        os.close(descriptor)  # without unlocking: the lock is that of the parent
        owner._descriptor = None  # the number is soon that of another file
    _held.clear()
