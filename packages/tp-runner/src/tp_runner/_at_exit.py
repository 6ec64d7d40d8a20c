"""Ending forgotten workers when the interpreter ends."""

import atexit
import weakref
from typing import Any

__all__ = ["watch"]

_open: weakref.WeakSet[Any] = weakref.WeakSet()
_last: list[Any] = []


def watch(closable: Any, *, last: bool = False) -> None:
    """Have ``closable.at_exit()`` called at the end of this process, if it still exists then.

    Args:
        closable: What to end.
        last: Whether to do so when all others have been; such a one is kept until then.
    """
    if last:
        _last.append(closable)
    else:
        _open.add(closable)


def _end_all() -> None:
    for closable in [*_open, *_last]:
        closable.at_exit()


atexit.register(_end_all)
