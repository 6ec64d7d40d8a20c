"""Exchange of pickled objects between ranks, with the place of each, and agreement on failures.

Each object travels with the place that exchanges it. A rank that calls `evaluate` where another one calls
`fit` would otherwise get the other's object, and fail or continue with wrong values.
"""

import linecache
import traceback
from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch.distributed as dist

from tp_core.errors import ConfigError, DisagreementError, StateError, TpError

T = TypeVar("T")


def gather_objects(value: T, *, where: str | None = None) -> list[T]:
    """Return every rank's object, in the order of the ranks; without a process group the own one alone.

    Args:
        value: This rank's object, which can be pickled.
        where: What the ranks exchange, in words, which must be the same on all; ``None`` is not compared.

    Raises:
        DisagreementError: On every rank, if one exchanges something else.

    Collective: one all-gather of pickled objects; a second one where the places differ.
    """
    if not dist.is_initialized():
        return [value]
    pairs: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pairs, (where, value))
    if any(_differ(pairs[0][0], place) for place, _ in pairs):
        lines: list[Any] = [None] * len(pairs)
        dist.all_gather_object(lines, _users_line())
        raise DisagreementError(_message([place for place, _ in pairs], lines))
    return [theirs for _, theirs in pairs]


def broadcast_object(value: T, *, src: int, where: str | None = None) -> T:
    """Return the object of rank ``src``, on all ranks.

    Args:
        value: The object of this rank, which matters on rank ``src``.
        src: The rank.
        where: As for `gather_objects`.

    Raises:
        DisagreementError: On each rank that expects something else than ``src`` sends.

    Collective: one broadcast of a pickled object.
    """
    line = _users_line()
    sent: list[Any] = [(where, line, value)]
    dist.broadcast_object_list(sent, src=src)
    other_place, other_line, theirs = cast("tuple[str | None, str, T]", sent[0])
    if _differ(where, other_place):
        raise DisagreementError(_message([other_place, where], [other_line, line], (src, dist.get_rank())))
    return theirs


def _differ(first: str | None, other: str | None) -> bool:
    return first is not None and other is not None and first != other


def _users_line() -> str:
    """Return the line of the user's program that led here, for a message."""
    # From the stack: the program calls fit() or evaluate(), which cannot be asked for its caller's line.
    for frame, number in traceback.walk_stack(None):
        if not frame.f_globals.get("__name__", "").startswith(("tp_", "contextlib")):
            file = frame.f_code.co_filename
            return f"{file}:{number}: {linecache.getline(file, number).strip()}"
    return "a thread of its own"


def _message(places: list[str | None], lines: list[str], ranks: tuple[int, ...] = ()) -> str:
    ranks = ranks or tuple(range(len(places)))
    other = next(i for i, place in enumerate(places) if _differ(places[0], place))
    first, second = (f"rank {ranks[i]} at {lines[i]} (in {places[i]})" for i in (0, other))
    return (
        f"ranks are at different places: {first}; {second}. Every rank must make the same calls in the same "
        "order, with arguments of the same kinds"
    )


def agree_on_failure(failure: BaseException | None, gather: Callable[..., list[Any]], doing: str) -> None:
    """Raise on every rank if one has failed; every rank calls it, after what may fail.

    A rank that raised at once would leave the others waiting in their next collective.

    Args:
        failure: This rank's failure, or ``None``.
        gather: Returns the objects of all ranks: ``session.gather_objects``.
        doing: What was tried, for the message: "write the file x".

    Raises:
        Exception: This rank's own failure.
        OSError: Another rank's is one; the message names the rank.
        ConfigError: Another rank's is one.
        StateError: Another rank has failed otherwise.

    Collective: the one of ``gather``.
    """
    answers = gather(_described(failure), where="the outcomes of ranks")
    if isinstance(failure, Exception):
        raise failure
    for rank, answer in enumerate(answers):
        if answer is not None:
            kind, text = answer
            msg = f"rank {rank} could not {doing}: {text}"
            raise kind(msg) from failure


def _described(failure: BaseException | None) -> tuple[type[Exception], str] | None:
    """Return the class and the text of the exception that the other ranks raise for a failure."""
    if failure is None:
        return None
    kind = next((kind for kind in (OSError, ConfigError) if isinstance(failure, kind)), StateError)
    if isinstance(failure, (OSError, TpError)):
        return kind, str(failure)
    return kind, f"{type(failure).__name__}: {failure}"
