"""Ending forgotten workers when the interpreter ends."""

import atexit
import weakref
from typing import Any

__all__ = ["watch"]

_open: weakref.WeakSet[Any] = weakref.WeakSet()


def watch(closable: Any) -> None:
    """Have ``closable.stop()`` called at the end of this process, if it still exists then."""
    _open.add(closable)


def _stop_all() -> None:
    for closable in list(_open):
        closable.stop()


atexit.register(_stop_all)
