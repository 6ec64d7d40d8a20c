"""The name that was meant, at the end of a message about one that is not there."""

from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path

__all__ = ["did_you_mean", "file_meant"]


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'name'?"`` with the known name that is most like ``given``, or ``""``."""
    close = get_close_matches(given, sorted(known), n=1)
    return f"; did you mean {close[0]!r}?" if close else ""


def file_meant(path: Path) -> str:
    """Return ``"; did you mean 'file'?"`` with the file beside ``path`` that is most like it, or ``""``."""
    try:
        names = [child.name for child in path.parent.iterdir() if child.suffix == path.suffix]
    except OSError:
        return ""
    close = get_close_matches(path.name, sorted(names), n=1)
    return f"; did you mean {str(path.with_name(close[0]))!r}?" if close else ""
