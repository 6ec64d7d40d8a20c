"""What ranks and their launcher share when a signal ends them: the report of a rank, and closed terminals."""

import errno
import json
import os
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from tp_core.internal import write_atomically

__all__ = ["RANK_END", "RankEnd", "leave_closed_terminal", "read_rank_end", "write_rank_end"]

RANK_END = "TP_RANK_END"
"""The variable in which the launcher names the file that a rank is to write."""


@dataclass(frozen=True, slots=True)
class RankEnd:
    """The end of a rank by a signal that it heard.

    Attributes:
        signal: The number of the signal.
        saved: The checkpoint that the run can go on from, or ``None``.
    """

    signal: int
    saved: str | None


def write_rank_end(number: int, saved: Path | None) -> None:
    """Write the report for the launcher, if one has asked for it."""
    name = os.environ.get(RANK_END)
    if name is None:
        return
    values = {"signal": number, "saved": None if saved is None else str(saved.absolute())}

    def write(part: Path) -> None:
        part.write_text(json.dumps(values))

    with suppress(OSError):  # the launcher has gone with its folder: nobody would read it
        write_atomically(write, name)


def read_rank_end(path: Path) -> RankEnd | None:
    """Return the report of a rank; ``None`` if there is none."""
    try:
        values = json.loads(path.read_text())
        return RankEnd(int(values["signal"]), values["saved"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def leave_closed_terminal() -> None:
    """Discard output to a terminal that was closed: it would end the program with an error."""
    if sys.platform == "win32":
        return
    import termios

    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # hung up; what is not a terminal has another error
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
