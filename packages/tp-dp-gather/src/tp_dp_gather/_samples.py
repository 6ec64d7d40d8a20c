"""Which lists and tuples have an entry for each sample, and which one for each value.

A list of 8 texts beside tensors of 8 rows is cut like them, and ``[inputs, targets]`` is not, though there
may be two rows. So the session marks what its loader has collated: there the number of samples is known.
"""

from collections import deque
from collections.abc import Callable, MutableMapping
from itertools import islice
from typing import Any

from torch import Tensor
from tp_core.internal import Envelope, containers, is_array, length_along

__all__ = [
    "ColumnList",
    "CountedCollate",
    "Marker",
    "SampleList",
    "SampleTuple",
    "are_samples",
    "is_sequence",
]

_TABLE = containers()
_LOOKED_AT = 8
"""So many entries of a list say what it holds: each step asks."""


class SampleList(list[Any]):
    """A list with an entry for each sample of a batch."""


class SampleTuple(tuple[Any, ...]):
    """A tuple with an entry for each sample of a batch."""

    __slots__ = ()


class ColumnList(list[Any]):
    """A list with an entry for each value, each of which has rows."""


class CountedCollate:
    """Calls a collate function, and counts what it was given; a class, so that it can be pickled."""

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, items: list[Any]) -> Envelope:
        return Envelope(self.collate_fn(items), len(items))


class Marker:
    """Marks in the batches of one loader what has an entry for each sample.

    Args:
        dim: The dimension of the rows.
        lists_are_columns: Whether lists, but those of texts, are known to have an entry for each value,
            as those of torch's own collate function.
        uncut: Where to note, by id, what holds several samples and cannot be cut into them.
        counts: Where to note how many samples a batch has.
    """

    def __init__(
        self, dim: int, *, lists_are_columns: bool, uncut: MutableMapping[int, Any], counts: deque[int]
    ) -> None:
        self._dim = dim
        self._lists_are_columns = lists_are_columns
        self._uncut = uncut
        self._counts = counts
        self._others: set[tuple[int, ...]] = set()  # paths of lists that had another length than the batch

    def mark(self, batch: Any, samples: int) -> Any:
        """Return a batch of so many samples with its lists of samples marked."""
        self._counts.append(samples)
        return self._mark(batch, samples, ())

    def _mark(self, value: Any, samples: int, path: tuple[int, ...]) -> Any:
        container = _TABLE[type(value)]
        if container is None:
            if _is_uncut(value, samples, self._dim):
                self._note(value)
            return value
        if is_sequence(value):
            if len(value) != samples:
                self._others.add(path)
            elif path not in self._others and self._is_of_samples(value, samples):
                return SampleList(value) if isinstance(value, list) else SampleTuple(value)
        children = list(container.children(value))
        marked = [self._mark(child, samples, (*path, i)) for i, child in enumerate(children)]
        if type(value) is list and len(value) == samples and self._is_of_columns(value, samples, path):
            return ColumnList(marked)
        if all(new is old for new, old in zip(marked, children, strict=True)):
            return value
        return container.rebuild(value, marked)

    def _is_of_samples(self, value: Any, samples: int) -> bool:
        if self._lists_are_columns and not isinstance(value[0], str | bytes):
            return False
        return are_samples(value, samples, self._dim) is True

    def _is_of_columns(self, value: list[Any], samples: int, path: tuple[int, ...]) -> bool:
        known = self._lists_are_columns or path in self._others
        return known and are_samples(value, samples, self._dim) is not True

    def _note(self, value: Any) -> None:
        try:
            self._uncut[id(value)] = value
        except TypeError:  # of a class whose objects cannot be referred to weakly
            return


def _is_uncut(value: Any, samples: int, dim: int) -> bool:
    """Whether a value holds several samples whose rows are not along ``dim``, or not known."""
    if isinstance(value, Tensor):
        if value.is_nested or value.dim() < 2 or dim > 1:
            return False
        return value.shape[dim] != samples == value.shape[1 - dim]
    if length_along(value) is not None or isinstance(value, str | bytes | range | type | tuple):
        return False
    kind = type(value)
    if any(hasattr(kind, name) for name in ("to", "cuda", "__len__")):
        return True
    return any(
        isinstance(v, Tensor | list | dict) or is_array(v) for v in getattr(value, "__dict__", {}).values()
    )


def is_sequence(value: Any) -> bool:
    """Whether a value is a list, or a tuple without names."""
    return isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields"))


def are_samples(value: Any, rows: int, dim: int) -> bool | None:
    """Whether a sequence as long as there are rows has an entry for each; ``None`` where it may have.

    Entries of several kinds, some of which have rows, are values, as in ``[inputs, targets]``. Entries of one
    kind that all have rows, as two images of each sample have in a batch of two, may be either.
    """
    have_rows = [_has_rows(entry, rows, dim) for entry in value]
    if len({_kind(entry) for entry in value}) > 1:
        return not any(have_rows)
    return None if all(have_rows) else True


def _has_rows(value: Any, rows: int, dim: int) -> bool:
    container = _TABLE[type(value)]
    if container is None:
        return length_along(value, dim) == rows
    if is_sequence(value) and len(value) == rows and len({_kind(entry) for entry in value}) == 1:
        return True
    children = [child for child in container.children(value) if child is not None]
    return bool(children) and all(_has_rows(child, rows, dim) for child in children)


def _kind(value: Any) -> Any:
    """Return what the samples of a list have in common, however long they are."""
    if isinstance(value, Tensor) or is_array(value):
        return type(value), value.ndim, value.dtype
    container = _TABLE[type(value)]
    if container is None:
        return type(value)
    return type(value), frozenset(_kind(child) for child in islice(container.children(value), _LOOKED_AT))
