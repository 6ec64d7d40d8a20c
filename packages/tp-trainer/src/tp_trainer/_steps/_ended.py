"""A ``StopIteration`` that a user's function lets out, which would end an iteration around it unnoticed."""

import traceback
from collections.abc import Iterator
from contextlib import contextmanager

from tp_core.errors import StepError

__all__ = ["telling_of_ended_iterators"]


@contextmanager
def telling_of_ended_iterators() -> Iterator[None]:
    """Run a block that calls functions of the user's, and say where one asked an ended iterator for more.

    Python takes a ``StopIteration`` for the end of whatever iterates around the call; from a generator it is
    a ``RuntimeError`` without a word about where it came from.

    Raises:
        StepError: In place of the ``StopIteration``, which is its cause.
    """
    try:
        yield
    except StopIteration as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        msg = (
            f"StopIteration was raised in {last.name} ({last.filename}, line {last.lineno}): next() was "
            "called on an iterator that has ended; begin it anew there, as in itertools.cycle(loader), or "
            "give next() a default"
        )
        raise StepError(msg) from error
