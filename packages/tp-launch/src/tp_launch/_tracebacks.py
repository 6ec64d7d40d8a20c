"""Tracebacks in the output of ranks: their parts, and those that several ranks have in common."""

import re
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from tp_core.launching import LOST_RANK, tells_of_lost_rank

HEAD = "Traceback (most recent call last):"
_CHAIN = (
    "During handling of the above exception, another exception occurred:",
    "The above exception was the direct cause of the following exception:",
)
# Output of native code after the traceback of the exception that ended the process.
_AFTERMATH = ("terminate called", "Fatal Python error:")
_FRAME = re.compile(r'  File "(?P<path>.*)", line (?P<line>\d+)')
_OF_LOST_RANKS = ("RuntimeError", "DistNetworkError", "DistBackendError", "RankFailedError")
_INSTALLED = ("site-packages", "dist-packages")
_TOGETHER_S = 1.0  # ranks that fail within it have one note
_MAX_MESSAGES = 4


def last_traceback(text: str) -> str:
    """Return the last traceback in a text, with its chained ones; "" if there is none."""
    lines = text.splitlines()
    heads = [i for i, line in enumerate(lines) if line.strip() == HEAD]
    if not heads:
        return ""
    start = heads[-1]
    for head in reversed(heads[:-1]):
        between = [line.strip() for line in lines[head:start]]
        while between and not between[-1]:
            between.pop()
        if not between or between[-1] not in _CHAIN:
            break
        start = head
    end = next((i for i in range(start, len(lines)) if lines[i].startswith(_AFTERMATH)), len(lines))
    return "\n".join(lines[start:end])


def exception_of(traceback: str) -> str:
    """Return the lines after the last frame: the exception, its message and its notes."""
    lines = traceback.splitlines()
    heads = [i for i, line in enumerate(lines) if line.strip() == HEAD]
    if heads:
        start = heads[-1] + 1
        while start < len(lines) and lines[start].startswith("  "):
            start += 1
        return "\n".join(lines[start:])
    # A stack of native code.
    frames = [i for i, line in enumerate(lines) if line.startswith("  ")]
    start = frames[-1] + 1 if frames else 0
    return "\n".join(lines[start:])


@dataclass(frozen=True, slots=True)
class _Failure:
    """The tracebacks at the beginning of some lines, as one: chained exceptions have several.

    Attributes:
        frames: The lines that name files, of all of them.
        kinds: The types of their exceptions.
        exception: The line of the last exception.
        rest: The lines after it: the rest of its message, its notes, and what was written later.
    """

    frames: tuple[str, ...]
    kinds: tuple[str, ...]
    exception: str
    rest: list[str]


def _parse(lines: list[str]) -> _Failure | None:
    """Return what the lines tell of a failure; None if a traceback in them is not complete."""
    frames = []
    kinds = []
    end = 0
    is_inside = False
    for i, line in enumerate(lines):
        if line == HEAD:
            is_inside = True
        elif is_inside and _FRAME.match(line):
            frames.append(line)
        elif is_inside and not line.startswith("  "):
            is_inside = False
            kinds.append(line.partition(":")[0])
            end = i
    if is_inside or not kinds:
        return None
    return _Failure(tuple(frames), tuple(kinds), lines[end], lines[end + 1 :])


@dataclass(slots=True, eq=False)
class _ShownError:
    """An error that was shown, the rank in whose lines, and the exceptions of other ranks that had it."""

    rank: int
    failure: _Failure
    others: dict[int, str] = field(default_factory=dict)

    def note(self) -> list[str]:
        """Return the lines about the other ranks."""
        ranks = sorted([self.rank, *self.others])
        names = ", ".join(map(str, ranks[:-1]))
        lines = [
            f"tp launch: ranks {names} and {ranks[-1]}: the same error, which [rank{self.rank}] shows above"
        ]
        different = [
            f"  rank {rank}: {self.others[rank]}"
            for rank in ranks
            if rank != self.rank and self.others[rank] != self.failure.exception
        ]
        lines += different[:_MAX_MESSAGES]
        if len(different) > _MAX_MESSAGES:
            lines.append(f"  and {len(different) - _MAX_MESSAGES} more")
        return lines


class RankErrors:
    """Shows an error that several ranks have once, and a line for a rank that only lost another one.

    It serves one attempt. Errors are the same if they are of one type and have the same frames; their
    messages may have the number of the rank. The logs of the ranks keep everything.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()  # the tail writes in its thread, and the outcome is made in another one
        self._shown: dict[tuple[tuple[str, ...], tuple[str, ...]], _ShownError] = {}
        self._above: dict[int, int] = {}  # of a rank, the one whose lines show its last error
        self._without_note: list[_ShownError] = []
        self._since = 0.0

    def shown_by(self, rank: int) -> int | None:
        """Return the rank whose lines show the frames of a rank's last error; None if none do."""
        with self._lock:
            return self._above.get(rank)

    def shorten(self, rank: int, lines: list[str]) -> list[str]:
        """Return which lines of a rank to show, of those from the head of a traceback on."""
        failure = _parse(lines)
        with self._lock:
            if failure is None:
                self._above[rank] = rank
                return lines
            if _is_consequence(failure):
                self._above.pop(rank, None)
                return [_in_one_line(failure), *failure.rest]
            shown = self._shown.setdefault((failure.frames, failure.kinds), _ShownError(rank, failure))
            self._above[rank] = shown.rank
            if shown.rank == rank:
                return lines
            if shown not in self._without_note:
                self._without_note.append(shown)
            shown.others[rank] = failure.exception
            self._since = time.monotonic()
            return [line for line in failure.rest if line not in shown.failure.rest]

    def take_notes(self, *, last: bool) -> list[str]:
        """Return lines about the ranks that had the error of another one, unless more may come."""
        with self._lock:
            if not last and time.monotonic() - self._since < _TOGETHER_S:
                return []
            notes = [line for shown in self._without_note for line in shown.note()]
            for shown in self._without_note:
                shown.others.clear()
            self._without_note.clear()
            return notes


def is_complete(lines: list[str]) -> bool:
    """Return whether the tracebacks that begin in some lines end there, too."""
    return _parse(lines) is not None


def _is_consequence(failure: _Failure) -> bool:
    """Return whether a failure says no more than that another rank is gone."""
    # A script may have lost its own connections, or another rank while it handled an error of its own.
    if not all(kind.endswith(_OF_LOST_RANKS) for kind in failure.kinds):
        return False
    # Of a timeout the frames count: ranks that wait in different places may all be alive.
    text = failure.exception.lower()
    is_timeout = "timeout" in text or "timed out" in text
    return tells_of_lost_rank(failure.exception) and not is_timeout


def _in_one_line(failure: _Failure) -> str:
    places = [place for place in map(_FRAME.match, failure.frames) if place is not None]
    own = [place for place in places if not set(_INSTALLED).intersection(Path(place["path"]).parts)]
    where = ""
    if own:
        where = f" at line {own[-1]['line']} of {Path(own[-1]['path']).name}"
    return f"{LOST_RANK}{where}, and ends: {failure.exception}"
