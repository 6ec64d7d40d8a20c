"""What multiprocessing lets travel only to a process that is being started: locks, values, queues, events.

While a program is pickled, multiprocessing's own reducers are told that a process is being spawned; the
descriptors that they hand over are kept, and every worker gets them when it is started.
"""

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence

__all__ = ["collect_descriptors", "take_over"]

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
