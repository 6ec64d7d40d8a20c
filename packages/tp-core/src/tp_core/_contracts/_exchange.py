"""Objects exchanged between ranks, each with the place in the code where it is: other places are told.

A rank that calls `evaluate` where another one calls `fit` would get what it did not ask for, and fail of
that, or go on.
"""

import linecache
import sys
from types import FrameType
from typing import Any, TypeVar, cast

import torch.distributed as dist

from tp_core.errors import DisagreementError

__all__ = ["broadcast_object", "gather_objects"]

T = TypeVar("T")


def gather_objects(value: T, size: int) -> list[T]:
    """Return every rank's object, in the order of the ranks.

    Args:
        value: This rank's.
        size: How many ranks there are.

    Raises:
        DisagreementError: On every rank, if one is at another place of these packages.
    """
    found: list[Any] = [None] * size
    dist.all_gather_object(found, (_place(), value))
    if any(_differ(found[0][0], place) for place, _ in found):
        lines: list[Any] = [None] * size
        dist.all_gather_object(lines, _users_line())
        raise DisagreementError(_message([place for place, _ in found], lines))
    return [theirs for _, theirs in found]


def broadcast_object(value: T, *, src: int) -> T:
    """Return the object of rank ``src``, on all ranks.

    Raises:
        DisagreementError: On each rank that is at another place of these packages than ``src``.
    """
    place, line = _place(), _users_line()
    sent: list[Any] = [(place, line, value)]
    dist.broadcast_object_list(sent, src=src)
    other_place, other_line, theirs = cast("tuple[str | None, str, T]", sent[0])
    if _differ(place, other_place):
        raise DisagreementError(_message([other_place, place], [other_line, line], (src, dist.get_rank())))
    return theirs


def _place() -> str | None:
    """Return the function of these packages that exchanges objects; ``None`` for other code's."""
    frame = sys._getframe(3)  # this one, the exchange, and the session's method stand above it
    module = frame.f_globals.get("__name__", "")
    return f"{module}.{frame.f_code.co_qualname}" if module.startswith("tp_") else None


def _differ(one: str | None, other: str | None) -> bool:
    return one is not None and other is not None and one != other


def _users_line() -> str:
    """Return the line of the program that led here."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code, module = frame.f_code, frame.f_globals.get("__name__", "")
        if not module.startswith(("tp_", "contextlib")):
            line = linecache.getline(code.co_filename, frame.f_lineno).strip()
            return f"{code.co_filename}:{frame.f_lineno}: {line}"
        frame = frame.f_back
    return "a thread of its own"


def _message(places: list[str | None], lines: list[str], ranks: tuple[int, ...] = ()) -> str:
    ranks = ranks or tuple(range(len(places)))
    other = next(i for i, place in enumerate(places) if _differ(places[0], place))
    first, second = (f"rank {ranks[i]} at {lines[i]} (in {places[i]})" for i in (0, other))
    return (
        f"ranks are at different places: {first}; {second}. Every rank must make the same calls in the same "
        "order, with arguments of the same kinds"
    )
