"""The logs of the ranks: their temporary directory, and the copy of their lines to the launcher's streams."""

import codecs
import os
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

from tp_core.output import StandardStream

from tp_launch._tracebacks import HEAD, RankErrors, is_complete

_PREFIX = "tp-launch-"
_LOCK = "lock"
_INTERVAL_S = 0.05
_GRACE_S = 1.0  # after it an incomplete line is shown: a prompt, or a progress bar
_QUIET_S = 0.2  # after it a complete traceback is taken to be whole, with its notes
_CHUNK = 1 << 20
_CLEAR = "\x1b[K"  # to the end of the line


class TemporaryLogs:
    """Makes a directory for this launch, and removes the directories of killed launches.

    Each directory has a lock, which the kernel releases at the end of the process: an unlocked directory is
    of a launch that is gone.
    """

    def __init__(self) -> None:
        base = Path(tempfile.gettempdir())
        _clear(base)
        # Renamed once it is locked: another launch that starts now would remove an unlocked one.
        draft = Path(tempfile.mkdtemp(prefix=f".{_PREFIX}", dir=base))
        self._lock = _lock(draft, create=True)
        self.path = draft.rename(base / draft.name.removeprefix("."))

    def remove(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _clear(base: Path) -> None:
    """Remove the directories of this user's killed launches."""
    for path in base.glob(f"{_PREFIX}*"):
        try:
            status = path.lstat()
            if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
                continue
            lock = _lock(path, create=False)
        except OSError:
            continue  # its launch is alive, or another launch has just removed it
        if lock is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(lock)


def _lock(directory: Path, *, create: bool) -> int | None:
    """Lock a directory for as long as the descriptor is open.

    Raises:
        OSError: Another process has locked the directory, or it has no lock.
    """
    import fcntl  # Windows, on which nothing is launched, has none

    # O_NOFOLLOW: another user of the folder may have put a link there.
    flags = os.O_RDWR | os.O_NOFOLLOW
    if create:
        flags |= os.O_CREAT
    descriptor = os.open(directory / _LOCK, flags, 0o600)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        if not create:
            raise
        return None  # a file system without locks: no launch can lock the directory, and so none removes it
    return descriptor


class _StatusLine:
    """The last line of a terminal, while it shows the state of a rank's progress bar."""

    def __init__(self) -> None:
        self._out: StandardStream | None = None

    def show(self, out: StandardStream, text: str) -> None:
        # Cut: a carriage return goes back to the beginning of the last of several lines.
        out.write(f"\r{text[: out.columns() - 1]}{_CLEAR}")
        self._out = out

    def clear(self) -> None:
        if self._out is not None:
            self._out.write(f"\r{_CLEAR}")
            self._out.flush()  # another stream may write next
            self._out = None


@dataclass(slots=True)
class _FollowedLog:
    path: Path
    prefix: str
    out: StandardStream
    drop: str  # torch's own prefix of a traceback's lines
    status: _StatusLine | None  # of the terminal, if the lines go to one
    state: str = ""  # of a progress bar
    file: BinaryIO | None = None
    pending: str = ""
    since: float = 0.0
    cut: bool = False  # whether an incomplete line was shown: its rest may be a bare line end
    errors: RankErrors | None = None  # of a rank's stderr, unless all of it is to be shown
    rank: int = 0
    held: list[str] = field(default_factory=list)  # from the head of a traceback on
    held_since: float = 0.0
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )


class LogTail:
    """Follows files from a thread and writes their lines, each with a prefix, to text streams.

    An unbuffered ``print("x", 1)`` arrives as four writes. A line is shown when it is complete, so that the
    lines of several ranks never mix. A line that stays incomplete is shown after a second. On a terminal a
    progress bar is one line, which the next state or line overwrites. A traceback is held until it is whole,
    for a second at most.
    """

    def __init__(self) -> None:
        self._sources: list[_FollowedLog] = []
        self._status = _StatusLine()
        self._lock = threading.Lock()  # `follow` adds a source while the thread goes over them
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tp-launch-tail", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def follow(
        self,
        path: Path,
        *,
        prefix: str,
        out: StandardStream,
        drop: str = "",
        rank: int = 0,
        errors: RankErrors | None = None,
    ) -> None:
        """Show the lines of a file, which need not exist yet, without a leading ``drop``.

        Tracebacks are those of ``rank``, and ``errors`` shortens them.
        """
        with self._lock:
            if out is not None and out.isatty():
                status = self._status
            else:
                status = None
            self._sources.append(_FollowedLog(path, prefix, out, drop, status, errors=errors, rank=rank))

    def drain(self) -> None:
        """Show everything that the files have by now."""
        with self._lock:
            self._pump_all(last=True)

    def stop(self) -> None:
        """Show the rest, and end the thread."""
        self._stopping.set()
        self._thread.join()
        with self._lock:
            self._pump_all(last=True)
            for source in self._sources:
                if source.file is not None:
                    source.file.close()
            self._sources.clear()
            with suppress(OSError, ValueError):  # the reader is gone
                self._status.clear()

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            with self._lock:
                self._pump_all(last=False)

    def _pump_all(self, *, last: bool) -> None:
        for source in _by_last_write(self._sources):
            _pump(source, last=last)
        for source in self._sources:
            notes = [] if source.errors is None else source.errors.take_notes(last=last)
            if notes:
                _print_lines(source, notes)


def _by_last_write(sources: Iterable[_FollowedLog]) -> list[_FollowedLog]:
    """Return the sources in the order of their last writes, so that a rank's last line comes last."""

    def last_write(source: _FollowedLog) -> int:
        try:
            return source.path.stat().st_mtime_ns
        except OSError:  # not there yet
            return 0

    return sorted(sources, key=last_write)


def _pump(source: _FollowedLog, *, last: bool) -> None:
    """Write the complete lines, or everything if it is the last call."""
    if source.file is None:
        try:
            source.file = source.path.open("rb")
        except OSError:
            return
    while True:
        chunk = source.file.read(_CHUNK)
        if chunk:
            source.pending += source.decoder.decode(chunk)
            source.since = time.monotonic()
        lines = _take_lines(source) if chunk else []
        late = source.pending and time.monotonic() - source.since > _GRACE_S
        if late and source.status is not None and "\r" in source.pending:
            late = False  # the state of a slow bar
        if source.pending and not chunk and (last or late):
            lines.append(source.pending.strip("\r"))
            source.pending, source.cut = "", True
        if source.errors is not None:
            lines = _shorten_tracebacks(source, source.errors, lines, is_over=last and not chunk)
        if lines or source.state:
            _write(source, lines)
        if len(chunk) < _CHUNK and not (last and chunk):
            return


def _take_lines(source: _FollowedLog) -> list[str]:
    if source.status is not None:
        return _take_overwritten(source)
    # Progress bars end lines with a carriage return: each state becomes a line. A last "\r" is held back, as
    # the "\n" of a line end may follow.
    if source.pending.endswith("\r"):
        text, carriage_return = source.pending[:-1], "\r"
    else:
        text, carriage_return = source.pending, ""
    *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    source.pending = rest + carriage_return
    if lines and source.cut:
        source.cut = False
        if not lines[0]:
            lines = lines[1:]
    return lines


def _take_overwritten(source: _FollowedLog) -> list[str]:
    """Return the complete lines, as a terminal shows them, and note the newest state of the one under way."""
    *lines, rest = source.pending.replace("\r\n", "\n").split("\n")
    before, mark, newest = rest.removesuffix("\r").rpartition("\r")
    state = ""
    source.pending = rest
    if rest.endswith("\r"):
        state = newest
        source.pending = f"{newest}\r"  # which a line end may follow
    elif mark:
        state = before.rpartition("\r")[2]
        source.pending = f"\r{newest}"
    if state or lines:
        source.state = state
    shown = [line.removesuffix("\r").rpartition("\r")[2] for line in lines]
    if shown and source.cut:
        source.cut = False
        shown = shown if shown[0] else shown[1:]
    return shown


def _shorten_tracebacks(
    source: _FollowedLog, errors: RankErrors, lines: list[str], *, is_over: bool
) -> list[str]:
    """Return the lines to show now, and hold those of a traceback that may not be whole."""
    lines = [line.removeprefix(source.drop) for line in lines]
    now = time.monotonic()
    if not source.held:
        if HEAD not in lines:
            return lines
        head = lines.index(HEAD)
        lines, source.held = lines[:head], lines[head:]
        source.held_since = now
    else:
        source.held += lines
        lines = []
    is_late = now - source.held_since > _GRACE_S
    is_whole = now - source.since > _QUIET_S and is_complete(source.held)
    if is_over or is_late or is_whole:
        lines += errors.shorten(source.rank, source.held)
        source.held = []
    return lines


def _write(source: _FollowedLog, lines: list[str]) -> None:
    _print_lines(source, [source.prefix + line.removeprefix(source.drop) for line in lines])


def _print_lines(source: _FollowedLog, lines: list[str]) -> None:
    try:
        if source.status is not None:
            if lines:
                source.status.clear()
            elif source.state:
                source.status.show(source.out, source.prefix + source.state)
                source.state = ""
        source.out.write("".join(f"{line}\n" for line in lines))
        source.out.flush()
    except (OSError, ValueError):
        return  # the reader is gone (a closed pipe); the job continues
