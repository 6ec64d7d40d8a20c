"""The name that was meant, at the end of a message about one that is not there."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["did_you_mean", "file_meant"]


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'name'?"`` with the known name that is most like ``given``, or ``""``."""
    close = _closest(given, known)
    return f"; did you mean {close!r}?" if close else ""


def file_meant(path: "Path") -> str:
    """Return ``"; did you mean 'file'?"`` with the file beside ``path`` that is most like it, or ``""``."""
    try:
        names = [child.name for child in path.parent.iterdir() if child.suffix == path.suffix]
    except OSError:
        return ""
    close = _closest(path.name, names)
    return f"; did you mean {str(path.with_name(close))!r}?" if close else ""


def _closest(given: str, known: Iterable[str]) -> str | None:
    from difflib import get_close_matches  # for messages alone: every worker process would wait for it

    return next(iter(get_close_matches(given, sorted(known), n=1)), None)
