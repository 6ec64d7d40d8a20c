"""What a loop has to have done for it between batches, by ``fit`` or by a loop of the user's own."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

from tp_core.plugins import RunView

from tp_trainer._opening._boundaries import StepBoundaries

__all__ = ["Duties", "nothing"]


def nothing(*_: object) -> None:
    """Do nothing, whatever is given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Duties:
    """What a loop has to have done for it between batches, besides what it does itself.

    Attributes:
        validate: Returns the means of a validation. It is given the boundaries at which signals cut it short,
            or ``None``, and how many batches there are at most. ``None`` without a validation.
        check: Makes sure that what was trained may be kept.
        advance: Moves on what moves every epoch, given the epoch's means of training and validation.
        after_epoch: Called after every epoch.
        during: Returns the context in which the loop is open; ``None`` for none.
        tolerates: Whether losses that are not finite are left out.
        counts: Whether the loop counts samples itself, of batches whose loss it does not see.
    """

    validate: Callable[[StepBoundaries | None, int | None], Mapping[str, float]] | None = None
    check: Callable[[], None] = nothing
    advance: Callable[[Mapping[str, float], Mapping[str, float]], None] = nothing
    after_epoch: Callable[[], None] = nothing
    during: Callable[[RunView], AbstractContextManager[None]] | None = None
    tolerates: bool = False
    counts: bool = True
