"""An error of a user's code in one line, for commands whose own traceback would tell them nothing."""

import traceback

__all__ = ["raised_where"]


def raised_where(error: BaseException) -> str:
    """Return what was raised and where: ``"ValueError: no data (line 3 of train.py)"``."""
    file, line = traceback.extract_tb(error.__traceback__)[-1][:2]
    text = str(error)
    if isinstance(error, SyntaxError):
        file, line, text = error.filename or file, error.lineno or line, error.msg
    said = " ".join(f"{type(error).__name__}: {text}".split()).rstrip(": ")
    return f"{said} (line {line} of {file})"
