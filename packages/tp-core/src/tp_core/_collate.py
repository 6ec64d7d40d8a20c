"""The contract of what turns one collate function into one that makes a batch per device."""

import abc
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Self

from tp_core._verdict import Verdict

__all__ = ["CollateAdapter", "Parts"]


class Parts(tuple[Any, ...]):
    """One batch for each device that takes part, and how many samples each part holds.

    Attributes:
        counts: Samples in each part, in the order of the parts.
        order: Where each sample of the concatenated parts stood in the original list, or ``None``
            when the parts keep the order.
    """

    counts: tuple[int, ...]
    order: tuple[int, ...] | None

    def __new__(
        cls,
        parts: Sequence[Any],
        *,
        counts: Sequence[int],
        order: Sequence[int] | None = None,
    ) -> Self:
        """Make the parts.

        Raises:
            ValueError: There are not as many counts as parts.
        """
        if len(parts) != len(counts):
            msg = f"{len(parts)} parts need as many sample counts, got {len(counts)}: {counts!r}"
            raise ValueError(msg)
        self = super().__new__(cls, parts)
        self.counts = tuple(counts)
        self.order = None if order is None else tuple(order)
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        # Batches cross process boundaries when a loader has workers.
        return _rebuild_parts, (tuple(self), self.counts, self.order)


def _rebuild_parts(parts: tuple[Any, ...], counts: tuple[int, ...], order: tuple[int, ...] | None) -> Parts:
    return Parts(parts, counts=counts, order=order)


class CollateAdapter(abc.ABC):
    """Makes a user's collate function return one batch per device.

    Attributes:
        name: What users write to ask for this adapter.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def assess(self, sample: Any, parts: int) -> Verdict:
        """Say whether lists of items like ``sample`` can be split into ``parts`` batches."""

    @abc.abstractmethod
    def adapt(
        self,
        collate_fn: Callable[[list[Any]], Any],
        *,
        parts: int,
        weights: Sequence[float] | None = None,
        cost: Callable[[Any], float] | None = None,
    ) -> Callable[[list[Any]], Parts]:
        """Return a collate function that takes the same list of items and returns :class:`Parts`.

        Args:
            collate_fn: The user's own collate function.
            parts: How many parts to make at most; fewer items make fewer parts.
            weights: The share of each part, e.g. ``[2, 1]`` for a fast and a slow device.
            cost: The cost of an item; parts then have nearly equal total cost.
        """
