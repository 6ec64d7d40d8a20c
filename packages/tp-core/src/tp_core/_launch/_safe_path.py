"""Processes that multiprocessing starts, without the current folder among the places of modules.

multiprocessing starts its fork server, its resource tracker and spawned processes as ``python -c``. Until
such a process has its parent's path, it looks for modules in the current folder first: a file ``uuid.py``
in a folder of someone else would run in the place of Python's own.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_VARIABLE = "PYTHONSAFEPATH"  # Python's own; multiprocessing passes no flag
_OURS = "tp"  # any text means yes; this one is not the user's

_starting = threading.Lock()

# In a process that was started so: what it starts itself, such as a script, has the usual path.
if os.environ.get(_VARIABLE) == _OURS:
    del os.environ[_VARIABLE]


@contextmanager
def safe_module_path() -> Iterator[None]:
    """Start processes without the current folder on their path; they drop the variable with this module."""
    with _starting:
        if os.environ.get(_VARIABLE):
            yield
            return
        os.environ[_VARIABLE] = _OURS
        try:
            yield
        finally:
            del os.environ[_VARIABLE]
