"""The contract of collate adapters, which turn a collate function into one with a batch per device."""

import abc
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tp_core._contracts._backend import Verdict

if TYPE_CHECKING:
    from tp_core._contracts._batch import Parts  # imports torch, which the module of a plugin must not


class CollateAdapter(abc.ABC):
    """An adapter that makes a user's collate function return one batch per device.

    Attributes:
        name: The name by which users choose this adapter.
    """

    name: ClassVar[str]

    @abc.abstractmethod
    def assess(self, sample: Any, parts: int) -> Verdict:
        """Return whether lists of items like ``sample`` can be split into ``parts`` batches."""

    @abc.abstractmethod
    def adapt(
        self,
        collate_fn: Callable[[list[Any]], Any],
        *,
        parts: int,
        weights: Sequence[float] | None = None,
        cost: Callable[[Any], float] | None = None,
    ) -> "Callable[[list[Any]], Parts]":
        """Return a collate function that takes the same list of items and returns `Parts`.

        Args:
            collate_fn: The user's own collate function.
            parts: The largest number of parts; fewer items make fewer parts.
            weights: The share of each part, e.g. ``[2, 1]`` for a fast and a slow device.
            cost: The cost of an item; parts then have nearly equal total cost.

        Raises:
            tp_core.errors.ConfigError: An argument has a wrong value; or, in the function that is returned,
                samples cannot be split so.
        """
