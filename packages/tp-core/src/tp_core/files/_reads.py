"""Reads that tell a file that is not there from one that cannot be read now.

A stale handle of a network file system, a right that is missing for a moment, a disk that answers with an
error, no descriptor left: none of these says anything about the contents of a file. Only its absence, its
size and its digest do.
"""

import errno
import stat
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from tp_core.output import get_logger

log = get_logger("tp_core")

T = TypeVar("T")

_RETRY_S = 5.0  # a server of files that is started anew takes longer, and then the caller raises
_INTERVAL_S = 0.1


def is_absence(error: OSError) -> bool:
    """Return whether an error says that there is no such file, or something else in its place."""
    # By class, too: safetensors raises them without a number.
    kinds = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
    return isinstance(error, kinds) or error.errno == errno.ELOOP  # a link to itself


def is_regular_file(path: Path) -> bool:
    """Return whether a path leads to a regular file.

    Raises:
        OSError: The system cannot say. ``Path.is_file`` calls that "no" from Python 3.14 on.
    """
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except OSError as error:
        if is_absence(error):
            return False
        raise


def retry_read(read: Callable[[], T]) -> T:
    """Return what ``read`` returns; call it again for some seconds while the system cannot read.

    Raises:
        OSError: The file is not there, which raises at once; or it could not be read all the time.
    """
    deadline = time.monotonic() + _RETRY_S
    is_first = True
    while True:
        try:
            return read()
        except OSError as error:
            if is_absence(error) or time.monotonic() > deadline:
                raise
            if is_first:
                log.warning("%s; it is tried again for %g s", error, _RETRY_S)
        is_first = False
        time.sleep(_INTERVAL_S)
