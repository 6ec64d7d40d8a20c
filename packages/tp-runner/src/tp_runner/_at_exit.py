"""Ending forgotten workers when the interpreter ends."""

import atexit
import os
import weakref
from typing import Any

__all__ = ["watch"]

_open: weakref.WeakSet[Any] = weakref.WeakSet()
_last: list[Any] = []
_owner = 0


def watch(closable: Any, *, last: bool = False) -> None:
    """Have ``closable.at_exit()`` called at the end of this process, if it still exists then.

    Args:
        closable: What to end.
        last: Whether to do so when all others have been; such a one is kept until then.
    """
    global _owner  # noqa: PLW0603 - it is about the process
    if _owner != os.getpid():  # a forked worker has none of its parent's, and may start runners, too
        _owner = os.getpid()
        atexit.register(_end_all)
    if last:
        _last.append(closable)
    else:
        _open.add(closable)


def _end_all() -> None:
    for closable in [*_open, *_last]:
        closable.at_exit()
