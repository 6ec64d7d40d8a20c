"""Which values of a batch have an entry for each sample, and which are the same however many there are.

A list of 8 texts beside tensors of 8 rows is cut like them, and ``[inputs, targets]`` is not, though there
may be two rows; a mask over 8 steps of time has nothing of a sample. The lengths of one batch cannot say
which is which. So the session counts what its loader collates, and has it collate half of the first batch as
well: what has an entry for each sample is half as long.
"""

import copy
import logging
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sized
from contextlib import contextmanager
from itertools import islice
from typing import Any
from weakref import WeakValueDictionary

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from tp_core import tree_leaves
from tp_core.internal import Envelope, containers, is_array, length_along, seeded

__all__ = [
    "Columns",
    "CountedCollate",
    "Known",
    "Marker",
    "SampleList",
    "SampleTuple",
    "Uncut",
    "are_samples",
    "is_sequence",
]

log = logging.getLogger("tp_dp_gather")

_TABLE = containers()
_LOOKED_AT = 8
"""So many entries of a list say what it holds: each step asks."""
_BATCHES = 8
"""One step may take batches of so many loaders."""

Path = tuple[str, ...]
Layout = Mapping[Path, tuple[bool, ...] | None]
"""Which dimensions of a value follow the number of samples; ``None`` where its shape is fixed."""


class SampleList(list[Any]):
    """A list with an entry for each sample of a batch."""


class SampleTuple(tuple[Any, ...]):
    """A tuple with an entry for each sample of a batch."""

    __slots__ = ()


class Columns:
    """A list or tuple that is as long as the batch, and has an entry for each value."""

    __slots__ = ()


class _ColumnList(Columns, list[Any]):
    pass


class _ColumnTuple(Columns, tuple[Any, ...]):
    __slots__ = ()


class Uncut:
    """A list or tuple with the entries of all samples, which are several of some and none of others."""

    __slots__ = ()


class _UncutList(Uncut, list[Any]):
    pass


class _UncutTuple(Uncut, tuple[Any, ...]):
    __slots__ = ()


class _ById:
    """A set of objects by identity: tensors have no other equality."""

    def __init__(self) -> None:
        self._weak: WeakValueDictionary[int, Any] = WeakValueDictionary()
        # What nothing can refer to weakly, as dicts and ranges; few, for they may hold tensors.
        self._strong: deque[Any] = deque(maxlen=_BATCHES)

    def add(self, value: Any) -> None:
        try:
            self._weak[id(value)] = value
        except TypeError:
            self._strong.append(value)

    def __contains__(self, value: object) -> bool:
        found = self._weak.get(id(value), self)  # not None, which batches hold, too
        return found is value or any(each is value for each in self._strong)


class Known:
    """What is known of the values of the last batches of a session's loaders.

    Attributes:
        rows: What has a row for each sample.
        whole: What has the same shape for any number of samples.
        uncut: What holds several samples and cannot be cut into them.
        counts: How many samples the batches have.
        shapes: Of each batch, the shapes of what is whole, and as long as the batch by chance.
        running: Where a part of a batch is computed now, by any object: threads of the model ask here, too.
    """

    def __init__(self) -> None:
        self.rows, self.whole, self.uncut = _ById(), _ById(), _ById()
        self.counts: deque[int] = deque(maxlen=_BATCHES)
        self.shapes: deque[set[tuple[int, ...]]] = deque(maxlen=_BATCHES)
        self.running: dict[object, str] = {}

    @contextmanager
    def in_parts(self, where: str) -> Iterator[None]:
        """Run a block in which each device has a part of the batch alone."""
        token = object()
        self.running[token] = where
        try:
            yield
        finally:
            del self.running[token]

    def __reduce__(self) -> tuple[type["Known"], tuple[()]]:
        return Known, ()  # for copies of a prepared model: its batches are not theirs


class CountedCollate:
    """Calls a collate function, and counts what it was given; a class, so that it can be pickled.

    The first batch of several samples is collated twice: whole, and with half of the samples, from copies.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn
        self._layout: Layout | None = None

    def __call__(self, items: list[Any]) -> Envelope:
        others: list[tuple[Any, int]] = []
        if self._layout is None and isinstance(items, list) and len(items) > 1:
            self._layout = {}
            others = self._of_other_sizes(items)
        batch = self.collate_fn(items)
        for other, count in others:
            counts = _samples(batch, len(items)), _samples(other, count)
            self._layout = dict(_compared(batch, other, counts, ()))
        return Envelope(batch, len(items), self._layout)

    def _of_other_sizes(self, items: list[Any]) -> list[tuple[Any, int]]:
        """Return a batch of half of the samples, or of twice as many, and of how many; none if both fail.

        Random generators are left as they were, and so are the samples, to which some functions write.
        """
        for some in (items[: len(items) // 2], items + items):
            try:
                copies = copy.deepcopy(some)
            except Exception:  # noqa: BLE001 - of open files, say
                copies = some
            with seeded(0):
                try:
                    return [(self.collate_fn(copies), len(copies))]
                except Exception as error:  # noqa: BLE001 - it may refuse such a number of items
                    reason = repr(error)
        log.warning(
            "collate_fn takes no other number of samples than %d (%s), so that what is as long as the batch "
            "is taken to have an entry for each sample",
            len(items),
            reason,
        )
        return []


def _compared(
    value: Any, half: Any, counts: tuple[int, int], path: Path
) -> Iterator[tuple[Path, tuple[bool, ...] | None]]:
    """Yield the path of each value, and what its shapes in batches of two sizes say."""
    if type(value) is not type(half):
        return
    shape, other = _shape(value), _shape(half)
    if shape is not None and other is not None:
        follows = tuple(pair == counts for pair in zip(shape, other, strict=False))
        yield path, None if shape == other else follows if any(follows) else ()
        if follows == (True,):
            return
    container = _TABLE[type(value)]
    if container is not None:
        labels = container.labels(value), container.labels(half)
        children = container.children(value), container.children(half)
        for name, its_name, child, fewer in zip(*labels, *children, strict=False):
            if name == its_name:
                yield from _compared(child, fewer, counts, (*path, name))


class Marker:
    """Notes of the batches of one loader what has an entry for each sample.

    Args:
        dim: The dimension of the rows.
        known: Where to note it.
    """

    def __init__(self, dim: int, known: Known) -> None:
        self._dim = dim
        self._known = known
        self._layout: Layout = {}

    def mark(self, batch: Any, samples: int, layout: Layout | None) -> Any:
        """Return a batch of so many samples with its lists of samples marked."""
        if layout:
            self._layout = layout
        samples = _samples(batch, samples)
        self._known.counts.append(samples)
        self._known.shapes.append(set())
        return self._mark(batch, samples, ())

    def _mark(self, value: Any, samples: int, path: Path) -> Any:
        container = _TABLE[type(value)]
        follows = self._layout.get(path, ())
        if container is None:
            self._note(value, samples, follows, is_known=path in self._layout)
            return value
        is_of_samples = follows == (True,)
        if is_sequence(value):
            if path not in self._layout:
                is_of_samples = len(value) == samples and are_samples(value, samples, self._dim) is True
            if is_of_samples:
                return SampleList(value) if isinstance(value, list) else SampleTuple(value)
            if value and path in self._layout and follows == () and not _has_length(value, samples):
                return _UncutList(value) if isinstance(value, list) else _UncutTuple(value)
        elif is_of_samples and isinstance(value, Mapping):
            self._known.uncut.add(value)
            return value
        children = list(container.children(value))
        marked = [
            self._mark(child, samples, (*path, name))
            for name, child in zip(container.labels(value), children, strict=True)
        ]
        if follows is None and len(value) == samples and type(value) in {list, tuple}:
            return _ColumnList(marked) if type(value) is list else _ColumnTuple(marked)
        is_same = all(new is old for new, old in zip(marked, children, strict=True))
        return value if is_same else container.rebuild(value, marked)

    def _note(self, value: Any, samples: int, follows: tuple[bool, ...] | None, *, is_known: bool) -> None:
        known, dim = self._known, self._dim
        shape = _shape(value)
        if isinstance(value, Tensor | PackedSequence) or is_array(value):
            if not shape:  # a scalar
                return
            length = length_along(value, dim)
            if follows is None:
                known.whole.add(value)
                if length == samples:
                    known.shapes[-1].add(shape)
            elif length == samples and (
                _is_only(dim, follows, shape, samples) if any(follows) else not is_known
            ):
                known.rows.add(value)
            elif length is not None or is_known or samples in shape:
                known.uncut.add(value)
        elif isinstance(value, str | bytes | range | type) or follows is None:
            if follows == (True,):
                known.uncut.add(value)
        elif shape is not None or _holds_values(value):
            known.uncut.add(value)


def _is_only(dim: int, follows: tuple[bool, ...], shape: tuple[int, ...], samples: int) -> bool:
    """Whether the samples are along one dimension, and not along two, as in distances between them."""
    sizes = [n for follow, n in zip(follows, shape, strict=False) if follow]
    return follows[dim] and sizes.count(samples) == 1


def _samples(batch: Any, chosen: int) -> int:
    """Return how many samples a batch has: collate functions may leave out some of those that were chosen."""
    if _has_length(batch, chosen):
        return chosen
    first = next((leaf for leaf in tree_leaves(batch) if _has_rows_of_its_own(leaf)), None)
    found = None if first is None else length_along(first)
    return found if found is not None and 0 < found < chosen else chosen


def _has_length(value: Any, length: int) -> bool:
    container = _TABLE[type(value)]
    if container is None:
        return _has_rows_of_its_own(value) and length in (_shape(value) or ())
    if is_sequence(value) and len(value) == length:
        return True
    return any(_has_length(child, length) for child in container.children(value))


def _has_rows_of_its_own(value: Any) -> bool:
    return isinstance(value, Tensor | PackedSequence) or is_array(value)


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the sizes of a value that may follow the samples; ``None`` where it has none."""
    if isinstance(value, PackedSequence) or (isinstance(value, Tensor) and value.is_nested):
        return (length_along(value) or 0,)
    if isinstance(value, Tensor) or is_array(value):
        return tuple(value.shape)
    try:
        return (len(value),) if isinstance(value, Sized) and not isinstance(value, type) else None
    except Exception:  # noqa: BLE001 - a user's class, whose length may not be known
        return None


def _holds_values(value: Any) -> bool:
    """Whether an object of an unknown class may hold something of the samples."""
    kind = type(value)
    return any(hasattr(kind, name) for name in ("to", "cuda")) or any(
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
