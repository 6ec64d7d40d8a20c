"""Which descriptors a forked copy of this process must not keep open.

A worker knows of its parent's death by the end of a pipe. Any process that was forked meanwhile and
still holds the other end would keep it from that knowledge.
"""

import contextlib
import os
import threading

__all__ = ["forget", "private"]

_descriptors: set[int] = set()
_lock = threading.Lock()


def private(*descriptors: int) -> None:
    """Have forked copies of this process close these descriptors at once."""
    with _lock:
        _descriptors.update(descriptors)


def forget(*descriptors: int) -> None:
    """Undo :func:`private` for descriptors that are about to be closed."""
    with _lock:
        _descriptors.difference_update(descriptors)


def _close_all() -> None:
    for descriptor in _descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


def _after_in_child() -> None:
    _lock.release()
    _close_all()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_in_child)
