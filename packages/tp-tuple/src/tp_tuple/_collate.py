"""Batches in parts: `tp_collate`, a loader's collate functions, and the choice of their adapter."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, NoReturn, TypeVar

import torch
from torch import Tensor
from torch.utils.data import default_collate as torch_default_collate
from tp_core.arguments import explain_arguments
from tp_core.data import Envelope, Parts
from tp_core.errors import ConfigError, LoaderError, StepError
from tp_core.output import get_logger
from tp_core.plugins import CollateAdapter, Verdict
from tp_core.random import seeded

from tp_tuple._balance import Speeds, Weights, balanced_rows, check_weights, consecutive_rows, resolve_weights
from tp_tuple._functions import per_value

T = TypeVar("T")
Select = Callable[[Any, Sequence[int]], Any]

_PLAIN = frozenset({tuple, list})
_VALUES = frozenset({Tensor, float, int})


class MeasuredParts(Parts):
    """Parts with sizes by measured speeds; `TupleParallel` notes new measurements in ``speeds``."""

    speeds: Speeds

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (tuple(self), self.counts, self.order, self.speeds)


def _rebuild(
    parts: tuple[Any, ...], counts: tuple[int, ...], order: tuple[int, ...] | None, speeds: Speeds
) -> MeasuredParts:
    made = MeasuredParts(parts, counts=counts, order=order)
    made.speeds = speeds
    return made


class Splitter:
    """Splits lists of items into one list for each device."""

    def __init__(
        self,
        parts: int,
        *,
        weights: Sequence[float] | Speeds | None,
        cost: Callable[[Any], float] | None,
        select: Select | None,
    ) -> None:
        self._parts = parts
        self.speeds: Speeds | None = None
        self._weights: Sequence[float] | None = None
        if isinstance(weights, Speeds):
            self.speeds = weights
        elif weights is not None:
            self._weights = check_weights(weights, parts)
        self._cost = cost
        self._select = select

    def rows(self, items: Any) -> tuple[Sequence[Sequence[int]], list[int] | None]:
        """Return the rows of each part, and the order of the items unless it is kept."""
        length = len(items)
        if length == 0:
            msg = "cannot split a batch of no items; let the sampler leave such batches out"
            raise ConfigError(msg)
        if self.speeds is None:
            weights = self._weights
        else:
            weights = self.speeds.weights()
        if self._cost is None:
            return consecutive_rows(length, self._parts, weights), None
        costs = [_number(self._cost(item), i) for i, item in enumerate(items)]
        pieces = balanced_rows(costs, self._parts, weights)
        return pieces, [row for piece in pieces for row in piece]

    def take(self, items: Any, rows: Sequence[int]) -> Any:
        if self._select is not None:
            return self._select(items, rows)
        if isinstance(rows, range) and isinstance(items, list):
            return items[rows.start : rows.stop]
        if isinstance(items, Mapping) or hasattr(items, "columns"):
            raise ConfigError(_needs_select(items))  # an index would take a column
        try:
            return [items[row] for row in rows]
        except (LookupError, TypeError) as error:
            raise ConfigError(_needs_select(items)) from error

    def collate(self, collate_fn: Callable[[Any], T], items: Any, pieces: Sequence[Sequence[int]]) -> list[T]:
        """Return the batch of each piece; a note on an error says how many items the function got."""
        batches = []
        for rows in pieces:
            try:
                batches.append(collate_fn(self.take(items, rows)))
            except Exception as error:
                if len(pieces) > 1:
                    error.add_note(
                        f"collate_fn got {len(rows)} of the {len(items)} samples of a batch, those of "
                        "one device. If it leaves samples out, none may be left for a device: leave them out "
                        "in the dataset or the sampler"
                    )
                raise
        return batches

    def label(self, values: Sequence[Any], counts: list[int], order: list[int] | None) -> Parts:
        if self.speeds is None:
            return Parts(values, counts=counts, order=order)
        kept_order = None if order is None else tuple(order)
        return _rebuild(tuple(values), tuple(counts), kept_order, self.speeds)


def _number(cost: Any, item: int) -> float:
    try:
        return float(cost)
    except (TypeError, ValueError) as error:
        msg = f"the cost of an item must be a number, not below 0; for item {item} it is {cost!r:.80}"
        raise ConfigError(msg) from error


def _needs_select(items: Any) -> str:
    name = type(items).__name__
    return (
        f"cannot take rows out of a {name}: pass select=, which is called with the {name} and the "
        "numbers of rows, e.g. select=lambda table, rows: table.iloc[list(rows)]"
    )


class TupleCollate:
    """Collate function that `tp_collate` returns; a class, as a loader's workers get it by pickle."""

    def __init__(self, collate_fn: Callable[[Any], Any], splitter: Splitter) -> None:
        self.collate_fn = collate_fn
        self.splitter = splitter
        self._is_torchs = collate_fn is torch_default_collate
        self._has_values = self._is_torchs  # a returned list is known to have one entry per value

    @property
    def speeds(self) -> Speeds | None:
        """The `Speeds` of ``weights="auto"``, or ``None``."""
        return self.splitter.speeds

    def __call__(self, items: Any) -> Any:
        splitter = self.splitter
        pieces, order = splitter.rows(items)
        counts = [len(rows) for rows in pieces]
        if self._is_torchs and order is None:
            whole = _collate_plain(items)
        else:
            whole = None
        if isinstance(whole, Tensor):
            return splitter.label(whole.split_with_sizes(counts), counts, None)
        if whole is not None:
            return tuple([splitter.label(tensor.split_with_sizes(counts), counts, None) for tensor in whole])
        batches = splitter.collate(self.collate_fn, items, pieces)
        if self._is_torchs and isinstance(batches[0], list) and isinstance(batches[0][0], str | bytes):
            return splitter.label(batches, counts, order)  # text stays a list of the items themselves
        if not self._has_values:
            self._look_at_lists(items, pieces, batches)
        return per_value(batches, lambda v: splitter.label(v, counts, order), mappings=True)

    def _look_at_lists(self, items: Any, pieces: Sequence[Sequence[int]], batches: list[Any]) -> None:
        """Check that a list has an entry for each value and not one for each item.

        Where both numbers are equal, call the function once more, with another number of items.
        """
        if not all(type(batch) in _PLAIN for batch in batches):
            return  # named tuples and other classes are never lists of items
        lengths = [len(batch) for batch in batches]
        counts = [len(rows) for rows in pieces]
        if len(set(lengths)) > 1 and lengths != counts:
            return  # per_value refuses it
        if lengths == counts and len(set(counts)) == 1:
            if counts[0] > 1:
                rows = pieces[0][:-1]
            else:
                rows = [*pieces[0], *pieces[0]]
            again = self._length_of_another(self.splitter.take(items, rows))
            if again != len(rows):
                self._has_values = True
                return
        elif lengths != counts:
            self._has_values = True
            return
        msg = (
            f"all parts must have the same number of values, got {lengths}: the collate function returned a "
            f"{type(batches[0]).__name__} with an entry for each item, and a list or tuple must have one for "
            'each value, (inputs, targets); put the list of items into a dict, {"items": items}'
        )
        raise ConfigError(msg)

    def _length_of_another(self, items: Any) -> int | None:
        """Return the length of the function's list for other items; leave random generators unchanged."""
        with seeded(0):
            try:
                batch = self.collate_fn(items)
            except Exception:  # noqa: BLE001 - it may refuse such a number of items: then it stays unknown
                return None
        if type(batch) in _PLAIN:
            return len(batch)
        return None


def _collate_plain(items: Any) -> Tensor | list[Tensor] | None:
    """Collate all items at once with torch's function, where they hold only tensors and numbers.

    Views of the result take less time than a call for each part. Return ``None`` where each part needs
    its own call.
    """
    if type(items) is not list:
        return None
    first = items[0]
    fields = first if type(first) in _PLAIN else (first,)
    if any(type(field) not in _VALUES for field in fields):
        return None
    try:
        whole: Tensor | list[Tensor] = torch_default_collate(items)
    except RuntimeError:  # items of one part may have one shape where those of all have not
        return None
    return whole


@explain_arguments("tp_collate(2)")
def tp_collate(
    ndevices: int | Sequence[Any],
    *,
    weights: Weights = None,
    cost: Callable[[Any], float] | None = None,
    select: Select | None = None,
) -> Callable[[Callable[[Any], Any]], TupleCollate]:
    """Return a decorator that makes a collate function work with `TupleParallel`.

    Where the function returned a batch ``x``, it now returns a tuple ``(x1, x2)`` with one part per
    device; where it returned ``(x, y)``, it is ``((x1, x2), (y1, y2))``, and where it returned a
    dict, a dict of such tuples, of the same type. A list or tuple must have an entry for each value;
    a function that returns one for each item is refused: let it return ``{"items": items}``.

    Fewer items than devices make fewer parts. The parts keep the order of the items, their sizes differ
    by at most one, and each tuple has ``.counts``: the samples in each part. Items may be anything:
    ragged lists, graphs, dicts, objects.

    Args:
        ndevices: The number of devices, or the devices themselves.
        weights: The share of each device: ``[2, 1]`` for a fast and a slow one; ``"memory"``, by
            memory that is free now; ``"auto"``, by speed, measured over the first steps of the
            `TupleParallel` that gets the parts (even shares until then). Each part gets at least
            one item while there are enough. A loader with ``pin_memory=True`` makes plain lists of
            tuples, which lose the speeds: give a `Speeds` to both sides instead of ``"auto"``.
        cost: The cost of an item, e.g. ``lambda graph: graph.num_nodes``, not below 0. Parts then have nearly
            equal total cost, by the longest-processing-time rule (Graham, 1969), and `restore_order` undoes
            it, by the ``.order`` of the tuples.
        select: ``select(items, rows)`` takes rows out of a container of items that is not a list: a
            table that a dataset's ``__getitems__`` returns, say. It needs a length.

    Raises:
        ConfigError: The number of devices is less than 1, or the weights do not fit it; when the decorated
            function is called, also for a batch of no items or a cost that is not a number.

    Example:
        >>> collate = tp_collate(2)(torch.stack)
        >>> [tuple(part.shape) for part in collate([torch.zeros(3)] * 5)]
        [(3, 3), (2, 3)]
    """
    if isinstance(ndevices, bool) or not isinstance(ndevices, int):
        if not isinstance(ndevices, Sequence) or isinstance(ndevices, str) or not ndevices:
            msg = f"ndevices must be a number or a list of devices, got {ndevices!r}"
            raise ConfigError(msg)
        if not all(isinstance(device, int | str | torch.device) for device in ndevices):
            kinds = ", ".join(sorted({type(device).__name__ for device in ndevices}))
            msg = (
                f"ndevices must be a number or a list of devices, got {len(ndevices)} values of {kinds}; "
                "if these are samples, call it with the number of devices first: "
                "DataLoader(..., collate_fn=default_collate(2))"
            )
            raise ConfigError(msg)
        devices: Sequence[Any] | None = ndevices
        count = len(ndevices)
    else:
        devices = None
        count = ndevices
    if count < 1:
        msg = f"ndevices must be at least 1, got {count}"
        raise ConfigError(msg)
    if cost is not None and not callable(cost):
        msg = f"cost must be a function of an item, which returns its work as a number, got {cost!r}"
        raise ConfigError(msg)
    resolved = resolve_weights(weights, count, devices)

    def decorator(collate_fn: Callable[[Any], Any]) -> TupleCollate:
        if not callable(collate_fn):
            msg = (
                "a collate function must be callable, got "
                f"{type(collate_fn).__name__}: {collate_fn!r:.80}; tp_collate(2) makes one of yours: write "
                "collate_fn=tp_collate(2)(collate_fn), or default_collate(2) for torch's own"
            )
            raise ConfigError(msg)
        return TupleCollate(collate_fn, Splitter(count, weights=resolved, cost=cost, select=select))

    return decorator


@explain_arguments("default_collate(2)")
def default_collate(
    ndevices: int | Sequence[Any],
    *,
    weights: Weights = None,
    cost: Callable[[Any], float] | None = None,
    select: Select | None = None,
) -> TupleCollate:
    """Return torch's default collate function, made for `TupleParallel` by `tp_collate`.

    Give it to a loader: ``DataLoader(..., collate_fn=default_collate(2))``. Items that are text stay
    lists, one for each part. It takes the arguments of `tp_collate` and raises the same errors.

    Example:
        >>> x, y = default_collate(2)([(1.0, 0), (2.0, 1), (3.0, 0)])
        >>> [part.tolist() for part in x]
        [[1.0, 2.0], [3.0]]
    """
    decorator = tp_collate(ndevices, weights=weights, cost=cost, select=select)
    return decorator(torch_default_collate)


# -- Batches in parts: a loader's collate functions, and the choice of their adapter --------------


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
        if not callable(collate_fn):
            msg = f"a collate function must be callable, got {type(collate_fn).__name__}: {collate_fn!r:.80}"
            raise ConfigError(msg)
        return _PartCollate(collate_fn, Splitter(parts, weights=weights, cost=cost, select=None))


class _PartCollate:
    def __init__(self, collate_fn: Callable[[list[Any]], Any], splitter: Splitter) -> None:
        self._collate_fn = collate_fn
        self._splitter = splitter

    def __call__(self, items: list[Any]) -> Parts:
        splitter = self._splitter
        pieces, order = splitter.rows(items)
        parts = splitter.collate(self._collate_fn, items, pieces)
        return splitter.label(parts, [len(rows) for rows in pieces], order)


log = get_logger("tp_tuple")


class PlacedParts(Parts):
    """Batch of a prepared loader: parts on their devices, for `TupleSession.run` alone."""

    def __iter__(self) -> NoReturn:
        raise StepError(self._taken_for_a_batch("cannot be unpacked as one"))

    # A class method: torch warns of plain methods here, and will refuse them.
    @classmethod
    def __torch_function__(
        cls, function: object, types: object, arguments: Sequence[Any] = (), options: Any = None
    ) -> NoReturn:
        values = [*arguments, *(options or {}).values()]
        for value in list(values):
            if type(value) in {list, tuple}:  # torch.cat([a, b])
                values += value
        parts = next(value for value in values if isinstance(value, cls))
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
    """Return the adapters to choose from: all that are installed for "auto", or the one of that name."""
    from tp_core.plugins import registry  # here: it imports pluggy, and collate functions alone need none

    adapters = {contribution.item.name: contribution.item for contribution in registry.collate_adapters()}
    adapters.setdefault(TupleCollateAdapter.name, TupleCollateAdapter())
    if name == "auto":
        return tuple(adapters[each] for each in sorted(adapters))
    if name not in adapters:
        registry.require(name)
        names = ", ".join(map(repr, sorted(adapters)))
        msg = f"no collate adapter {name!r} is installed; there are: {names}"
        raise ConfigError(msg)
    return (adapters[name],)
