"""The exit of a rank: its report to the launcher that started it, and its output to a closed terminal."""

import errno
import json
import os
import re
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

EXIT_REPORT = "TP_RANK_END"
"""The environment variable with the path of a rank's report, set by the launcher."""

LOST_RANK = "lost another rank"
"""The beginning of the line that a rank writes where it ends only because another one is gone."""

# Of torch's transports: never the cause where another rank has written something else.
_LOST_RANK = re.compile(
    r"closed by peer|reset by peer|broken pipe|remote process|ncclRemoteError|recvValue failed"
    r"|connection (?:refused|was closed)|socket (?:closed|timeout)|RankFailedError|DistNetworkError"
    r"|failed to recv|timed out waiting|peer (?:closed|is gone)",
    re.IGNORECASE,
)


def tells_of_lost_rank(text: str) -> bool:
    """Return whether the text of an error says no more than that another rank is gone."""
    return text.startswith(LOST_RANK) or _LOST_RANK.search(text) is not None


@dataclass(frozen=True, slots=True)
class ExitReport:
    """The exit of a rank after a signal that it handled, and the checkpoint to resume from.

    Attributes:
        signal: The signal; 0 of a rank that has seen none.
        saved: Its newest checkpoint; ``None`` if nothing was saved.
    """

    signal: int
    saved: str | None


def write_exit_report(number: int, saved: Path | None) -> None:
    """Tell the launcher, if one wants to know, which signal ended this rank and what it has saved.

    A rank that runs gives 0 after each save: one that is killed has no other time to say it.
    """
    name = os.environ.get(EXIT_REPORT)
    if name is None:
        return
    path = None if saved is None else str(saved.absolute())
    values = {"signal": number, "saved": path}
    draft = Path(f"{name}.part")
    with suppress(OSError):  # the launcher may be gone, with its folder
        draft.write_text(json.dumps(values))
        draft.replace(name)  # a launcher never reads half a report


def read_exit_report(path: Path) -> ExitReport | None:
    """Return the report in a file, or None if there is none that can be read."""
    try:
        values = json.loads(path.read_text())
        return ExitReport(int(values["signal"]), values["saved"])
    except (OSError, ValueError, TypeError, KeyError):
        return None


def discard_closed_terminal() -> None:
    """Discard output to a closed terminal: a write would end the program with an error."""
    if sys.platform == "win32":
        return
    import termios

    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:  # hung up; descriptors of files and pipes have another error
                # Replaced, not closed: the next opened file would get the number, and with it the output.
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
