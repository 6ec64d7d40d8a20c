"""Show what the ranks write, as whole lines, as soon as they are there.

An unbuffered ``print("x", 1)`` arrives as four writes. A line is shown when it is complete, so that
the lines of several ranks never mix; one that stays incomplete is shown after a second.
"""

import codecs
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, TextIO

__all__ = ["Tail"]

_INTERVAL_S = 0.05
_GRACE_S = 1.0
_CHUNK = 1 << 20


@dataclass(slots=True)
class _Source:
    path: Path
    prefix: str
    out: TextIO
    drop: str  # a prefix that torch itself puts before the lines of a traceback
    file: BinaryIO | None = None
    pending: str = ""
    since: float = 0.0
    cut: bool = False  # an incomplete line was shown: the rest of it may be a bare line end
    decoder: codecs.IncrementalDecoder = field(
        default_factory=lambda: codecs.getincrementaldecoder("utf-8")(errors="replace")
    )


class Tail:
    """Follows files from a thread and writes their lines, each with a prefix, to text streams.

    Example:
        >>> import sys
        >>> tail = Tail()
        >>> tail.start()
        >>> tail.follow(Path("rank0.log"), prefix="[rank0] ", out=sys.stdout)
        >>> tail.stop()
    """

    def __init__(self) -> None:
        self._sources: list[_Source] = []
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tp-launch-tail", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def follow(self, path: Path, *, prefix: str, out: TextIO, drop: str = "") -> None:
        """Show the lines of a file, which need not exist yet, without a leading ``drop``."""
        with self._lock:
            self._sources.append(_Source(path, prefix, out, drop))

    def stop(self) -> None:
        """Show what is left, then end the thread."""
        self._stopping.set()
        self._thread.join()
        with self._lock:
            for source in self._sources:
                _pump(source, last=True)
                if source.file is not None:
                    source.file.close()
            self._sources.clear()

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_S):
            with self._lock:
                for source in self._sources:
                    _pump(source, last=False)


def _pump(source: _Source, *, last: bool) -> None:
    """Write the lines that are complete, or all that is there."""
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
        lines = _take_lines(source)
        late = source.pending and time.monotonic() - source.since > _GRACE_S
        if source.pending and not chunk and (last or late):
            lines.append(source.pending.removesuffix("\r"))
            source.pending, source.cut = "", True
        if lines:
            _write(source, lines)
        if len(chunk) < _CHUNK and not (last and chunk):
            return


def _take_lines(source: _Source) -> list[str]:
    # A progress bar ends its lines with a carriage return: each of its states becomes a line.
    if source.pending.endswith("\r"):
        text, held = source.pending[:-1], "\r"
    else:
        text, held = source.pending, ""
    *lines, rest = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    source.pending = rest + held
    if lines and source.cut:
        source.cut = False
        if not lines[0]:
            lines = lines[1:]
    return lines


def _write(source: _Source, lines: list[str]) -> None:
    shown = (source.prefix + line.removeprefix(source.drop) for line in lines)
    try:
        source.out.write("".join(f"{line}\n" for line in shown))
        source.out.flush()
    except (OSError, ValueError):
        return  # the reader has gone (a closed pipe); the job goes on
