"""Which descriptors a forked copy of this process must not keep open.

A worker knows of its parent's death by the end of a pipe, and the parent of its worker's. Any process
that was forked meanwhile and still holds the other end would keep them from that knowledge.
"""

import contextlib
import os
import threading
from collections.abc import Iterator

__all__ = ["close", "inherited", "pipe", "pipes", "private"]

_descriptors: set[int] = set()
_lock = threading.Lock()
_wanted = threading.local()


def pipe() -> tuple[int, int]:
    """Open a pipe both of whose ends are private from the first moment, whatever other threads fork."""
    with _lock:
        ends = os.pipe()
        _descriptors.update(ends)
    return ends


def pipes(count: int) -> list[tuple[int, int]]:
    """Open several such pipes, or none."""
    opened: list[tuple[int, int]] = []
    try:
        for _ in range(count):
            opened.append(pipe())
    except OSError:
        for ends in opened:
            close(*ends)
        raise
    return opened


def private(*descriptors: int) -> None:
    """Have forked copies of this process close these descriptors at once."""
    with _lock:
        _descriptors.update(descriptors)


def close(*descriptors: int) -> None:
    """Close private descriptors."""
    with _lock:
        _descriptors.difference_update(descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


@contextlib.contextmanager
def inherited(*descriptors: int) -> Iterator[None]:
    """Let the copies that this thread forks meanwhile keep these descriptors."""
    _wanted.descriptors = descriptors
    try:
        yield
    finally:
        _wanted.descriptors = ()


def _after_in_child() -> None:
    _lock.release()
    keep = getattr(_wanted, "descriptors", ())
    for descriptor in _descriptors.difference(keep):
        with contextlib.suppress(OSError):
            os.close(descriptor)
    _descriptors.clear()


os.register_at_fork(before=_lock.acquire, after_in_parent=_lock.release, after_in_child=_after_in_child)
