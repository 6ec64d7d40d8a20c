"""Batches in parts: a loader's collate functions, and the choice of their adapter."""

import logging
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NoReturn

from tp_core.data import Parts
from tp_core.errors import ConfigError, LoaderError, StepError
from tp_core.internal import Envelope
from tp_core.plugins import CollateAdapter, Verdict, registry

from tp_tuple._balance import Speeds
from tp_tuple._collate import Splitter


class TupleCollateAdapter(CollateAdapter):
    """Adapter that splits the list of items and collates each piece; it fits all that can be collated."""

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
    """Collate function that returns parts; a class, as a loader's workers get it by pickle."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any], splitter: Splitter) -> None:
        self._collate_fn = collate_fn
        self._splitter = splitter

    def __call__(self, items: list[Any]) -> Parts:
        splitter = self._splitter
        pieces, order = splitter.rows(items)
        parts = splitter.collate(self._collate_fn, items, pieces)
        return splitter.label(parts, [len(rows) for rows in pieces], order)


log = logging.getLogger("tp_tuple")


class PlacedParts(Parts):
    """Batch of a prepared loader: parts on their devices, for `TupleSession.run` alone."""

    def __iter__(self) -> NoReturn:
        raise StepError(self._taken_for_a_batch("cannot be unpacked as one"))

    # A class method: torch warns of plain methods here, and will refuse them.
    @classmethod
    def __torch_function__(
        cls, function: object, types: object, arguments: Sequence[Any] = (), options: Any = None
    ) -> NoReturn:
        given = [*arguments, *(options or {}).values()]
        inner = [item for one in given if type(one) in {list, tuple} for item in one]  # torch.cat([a, b])
        parts = next(one for one in (*given, *inner) if isinstance(one, cls))
        raise StepError(parts._taken_for_a_batch("is not a tensor"))

    def __getattr__(self, name: str) -> NoReturn:
        raise AttributeError(self._taken_for_a_batch(f"has no attribute {name!r}"))


class AdaptedCollate:
    """The collate function of a loader; it takes the adapter that fits the first samples best."""

    def __init__(
        self,
        collate_fn: Callable[[list[Any]], Any],
        adapters: Sequence[CollateAdapter],
        parts: int,
        weights: Sequence[float] | Speeds | None,
        cost: Callable[[Any], float] | None,
    ) -> None:
        self._collate_fn = collate_fn
        self._adapters = adapters
        self._parts = parts
        self._weights = weights
        self._cost = cost
        self._adapted: Callable[[list[Any]], Parts] | None = None

    def __call__(self, items: list[Any]) -> Envelope:
        if self._adapted is None:
            self._adapted = self._choose(items[0]).adapt(
                self._collate_fn,
                parts=self._parts,
                weights=self._weights,
                cost=self._cost,
            )
        parts = self._adapted(items)
        return Envelope(parts, sum(parts.counts))

    def _choose(self, sample: Any) -> CollateAdapter:
        verdicts = [(a, _assess(a, sample, self._parts)) for a in self._adapters]
        fits = [(v.score, a) for a, v in verdicts if v.score is not None]
        if not fits:
            reasons = "; ".join(f"{a.name}: {v.reason}" for a, v in verdicts)
            msg = f"no collate adapter fits samples of type {type(sample).__name__}: {reasons}"
            raise LoaderError(msg)
        return max(fits, key=lambda pair: pair[0])[1]


def _assess(adapter: CollateAdapter, sample: Any, parts: int) -> Verdict:
    """Return an adapter's verdict; one that raises is left out, and named in the log."""
    try:
        verdict: object = adapter.assess(sample, parts)
        if isinstance(verdict, Verdict):
            return verdict
        reason = f"assess() must return a Verdict, got {type(verdict).__name__}"
    except Exception as error:  # noqa: BLE001 - a plugin may raise anything
        reason = f"assess() raised {type(error).__name__}: {error}"
    log.warning(
        "the collate adapter %r of %s is left out: %s", adapter.name, type(adapter).__module__, reason
    )
    return Verdict.unfit(reason)


def find_adapters(name: str) -> tuple[CollateAdapter, ...]:
    """Return the adapters to choose from: all that are installed for "auto", or the one of that name.

    Raises:
        ConfigError: No adapter of that name is installed.
        PluginError: The plugin of that name is broken, or was blocked.
    """
    found = {c.item.name: c.item for c in registry.collate_adapters()}
    found.setdefault(TupleCollateAdapter.name, TupleCollateAdapter())
    if name == "auto":
        return tuple(found[n] for n in sorted(found))
    if name not in found:
        registry.require(name)
        names = ", ".join(map(repr, sorted(found)))
        msg = f"no collate adapter {name!r} is installed; there are: {names}"
        raise ConfigError(msg)
    return (found[name],)
