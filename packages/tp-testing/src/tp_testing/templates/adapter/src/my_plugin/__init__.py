"""A collate adapter for tp: parts of a batch with nearly equal lengths.

tp loads this module with all other plugins at its first question, so it imports what is heavy
in functions only.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from tp_core.plugins import CollateAdapter, Verdict, hookimpl

if TYPE_CHECKING:
    from tp_core.data import Parts

tp_contract = 1


class MyPluginAdapter(CollateAdapter):
    """Deals samples out by their length, where some are much longer than others."""

    name: ClassVar[str] = "my-plugin"

    def assess(self, sample: Any, parts: int) -> Verdict:
        """Fit whatever has a length; other adapters are taken for what they know better."""
        if not hasattr(sample, "__len__"):
            return Verdict.unfit(f"a {type(sample).__name__} has no length")
        return Verdict.fits(5, f"{parts} parts with nearly equal lengths")

    def adapt(
        self,
        collate_fn: Callable[[list[Any]], Any],
        *,
        parts: int,
        weights: Sequence[float] | None = None,
        cost: Callable[[Any], float] | None = None,
    ) -> "Callable[[list[Any]], Parts]":
        """Return a collate function that makes one batch for each device."""
        from tp_core.data import Parts  # imports torch

        def collate(samples: list[Any]) -> Parts:
            hands = deal([(cost or len)(sample) for sample in samples], parts, weights)
            batches = [collate_fn([samples[i] for i in hand]) for hand in hands]
            order = [i for hand in hands for i in hand]
            return Parts(batches, counts=[len(hand) for hand in hands], order=order)

        return collate


def deal(
    costs: Sequence[float], parts: int, weights: Sequence[float] | None = None
) -> list[list[int]]:
    """Return which samples each part gets, none of them empty.

    The dearest sample goes first, each to the part that is done with it first: no part takes longer
    than 4/3 of the best possible (Graham, 1969).
    """
    parts = min(parts, len(costs))
    speeds = [1.0] * parts if weights is None else list(weights)
    hands: list[list[int]] = [[] for _ in range(parts)]
    loads = [0.0] * parts
    for sample in sorted(range(len(costs)), key=lambda i: -costs[i]):
        done = [(loads[part] + costs[sample]) / speeds[part] for part in range(parts)]
        chosen = min(range(parts), key=lambda part: (bool(hands[part]), done[part]))
        hands[chosen].append(sample)
        loads[chosen] += costs[sample]
    return [sorted(hand) for hand in hands]


@hookimpl
def tp_collate_adapters() -> Iterable[CollateAdapter]:
    """Bring the adapter."""
    return [MyPluginAdapter()]
