"""What a worker process inherits, and what it must not.

Locks, values, queues and events of multiprocessing travel only to a process that is being started. While a
program is pickled, multiprocessing's own reducers are told that a process is being spawned; the descriptors
that they hand over are kept, and every worker gets them when it is started.

A worker knows of its parent's death by the end of a pipe, and the parent of its worker's. Any process that
was forked meanwhile and still holds the other end would keep them from it: copies close such ends.
"""

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Sequence

_passed: tuple[int, ...] = ()  # the descriptors that this worker was started with


class _PassedFd:
    """A descriptor, by its place among those that a worker is started with."""

    def __init__(self, place: int) -> None:
        self._place = place

    def detach(self) -> int:
        """Return a descriptor of its own, in the worker."""
        return os.dup(_passed[self._place])


class _Spawning:
    """What multiprocessing's reducers ask for while a process is being spawned."""

    DupFd = _PassedFd

    def __init__(self, descriptors: list[int]) -> None:
        self._descriptors = descriptors

    def duplicate_for_child(self, fd: int) -> int:
        """Keep a duplicate of a descriptor for the workers; return its place."""
        self._descriptors.append(os.dup(fd))
        return len(self._descriptors) - 1


@contextlib.contextmanager
def collect_descriptors(descriptors: list[int]) -> Iterator[None]:
    """Let multiprocessing's objects be pickled; add what workers must be started with to ``descriptors``."""
    if "multiprocessing" not in sys.modules:  # then nobody has made one
        yield
        return
    from multiprocessing import context

    before = context.get_spawning_popen()
    context.set_spawning_popen(_Spawning(descriptors))  # type: ignore[arg-type]  # as much as is asked of it
    try:
        yield
    finally:
        context.set_spawning_popen(before)


def take_over(descriptors: Sequence[int]) -> None:
    """Note the descriptors that this worker was started with."""
    global _passed  # noqa: PLW0603 - it is about the process
    _passed = tuple(descriptors)
    for fd in _passed:
        os.set_inheritable(fd, False)


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
