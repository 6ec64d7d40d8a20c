"""The collate adapter for lists of items of any type."""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from tp_core.errors import ConfigError
from tp_core.plugins import CollateAdapter, Parts, Verdict

from tp_tuple._collate import Splitter
from tp_tuple._speeds import Speeds

__all__ = ["TupleCollateAdapter"]


class TupleCollateAdapter(CollateAdapter):
    """Splits the list of items and collates each piece separately: right for whatever can be collated."""

    name: ClassVar[str] = "tuple"

    def assess(self, sample: Any, parts: int) -> Verdict:  # noqa: ARG002 - any sample will do
        """Fit anything, and leave room for adapters that know the samples better."""
        if parts < 1:
            return Verdict.unfit(f"asked for {parts} parts", remedy="ask for at least 1")
        return Verdict.fits(10, "splits any list of items and collates each piece separately")

    def adapt(
        self,
        collate_fn: Callable[[list[Any]], Any],
        *,
        parts: int,
        weights: Sequence[float] | Speeds | None = None,
        cost: Callable[[Any], float] | None = None,
    ) -> Callable[[list[Any]], Parts]:
        """Return a collate function that makes one batch of each piece.

        Raises:
            ConfigError: ``collate_fn`` cannot be called, or the weights make no sense.
        """
        if not callable(collate_fn):
            msg = f"a collate function must be callable, got {type(collate_fn).__name__}: {collate_fn!r:.80}"
            raise ConfigError(msg)
        return _PartCollate(collate_fn, Splitter(parts, weights=weights, cost=cost, select=None))


class _PartCollate:
    """A class and no closure, so that a loader's worker processes can have it."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any], splitter: Splitter) -> None:
        self._collate_fn = collate_fn
        self._splitter = splitter

    def __call__(self, items: list[Any]) -> Parts:
        splitter = self._splitter
        pieces, order = splitter.rows(items)
        parts = splitter.collated(self._collate_fn, items, pieces)
        return splitter.label(parts, [len(rows) for rows in pieces], order)
