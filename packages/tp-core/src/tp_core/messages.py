"""Words of messages: the name that was meant, the extra to install, where a user's code raised."""

import traceback
from collections.abc import Iterable
from typing import TYPE_CHECKING

from tp_core.errors import ConfigError

if TYPE_CHECKING:
    from pathlib import Path  # every worker process of tp-runner would wait for its import

__all__ = ["check_installed", "closest", "did_you_mean", "file_meant", "raised_where", "those_known"]


def did_you_mean(given: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'name'?"`` with the known name that is most like ``given``, or ``""``."""
    close = closest(given, known)
    if close:
        return f"; did you mean {close!r}?"
    return ""


def those_known(given: str, known: Iterable[str]) -> str:
    """Return ``"; did you mean 'one'? It has: one, two"``, or ``"; it has: one, two"``."""
    suggestion = did_you_mean(given, known)
    start = f"{suggestion} It" if suggestion else "; it"
    return f"{start} has: {', '.join(known) or 'none'}"


def file_meant(path: "Path") -> str:
    """Return ``"; did you mean 'file'?"`` with the file beside ``path`` that is most like it, or ``""``."""
    try:
        names = [child.name for child in path.parent.iterdir() if child.suffix == path.suffix]
    except OSError:
        return ""
    close = closest(path.name, names)
    if close:
        return f"; did you mean {str(path.with_name(close))!r}?"
    return ""


def closest(given: str, known: Iterable[str]) -> str | None:
    """Return the known name that is most like ``given``, if one is."""
    from difflib import get_close_matches  # for messages alone: every worker process would wait for it

    return next(iter(get_close_matches(given, sorted(known), n=1)), None)


def check_installed(module: str, *, by: str, extra: str) -> None:
    """Make sure that a module is installed, without an import of it.

    Args:
        module: The module.
        by: The class that needs it.
        extra: The extra with it: "tp-trainer[wandb]".

    Raises:
        ConfigError: The module is not installed.
    """
    from importlib.util import find_spec  # here: every worker process of tp-runner would wait for it

    if find_spec(module) is None:
        msg = f"{by} needs the package {module}: pip install '{extra}'"
        raise ConfigError(msg)


def raised_where(error: BaseException) -> str:
    """Return what was raised and where: ``"ValueError: no data (line 3 of train.py)"``."""
    file, line = traceback.extract_tb(error.__traceback__)[-1][:2]
    text = str(error)
    if isinstance(error, SyntaxError):
        file, line, text = error.filename or file, error.lineno or line, error.msg
    text_line = " ".join(f"{type(error).__name__}: {text}".split()).rstrip(": ")
    return f"{text_line} (line {line} of {file})"
