"""The scatter: values of a batch with an entry for each sample, and arguments cut into parts; and the gather.

A list of 8 texts beside tensors of 8 rows is cut like them. ``[inputs, targets]`` is not, though there may
be two rows, nor is a mask over 8 time steps. The lengths of one batch cannot distinguish them. So the session
counts the samples that its loader collates, and collates half of the first batch, too: a value with an entry
for each sample is half as long.
"""

import copy
import dataclasses
import inspect
import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, islice
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from tp_core import recursive_to, tree_leaves
from tp_core.errors import ConfigError
from tp_core.internal import (
    Envelope,
    cat_rows,
    containers,
    is_array,
    length_along,
    seeded,
    split_evenly,
    split_rows,
    to_device,
)

log = logging.getLogger("tp_dp_gather")

_LOOKED_AT = 8  # this many entries say what a list holds: each step looks, so not at all of them
_BATCHES = 8  # this many batches stay known: one step may take batches of several loaders

Path = tuple[str, ...]
Layout = Mapping[Path, tuple[bool, ...] | None]
"""Which dimensions of a value follow the number of samples; ``None`` where its shape is fixed."""


class SampleList(list[Any]):
    """A list with an entry for each sample of a batch."""


class SampleTuple(tuple[Any, ...]):
    """A tuple with an entry for each sample of a batch."""


class ColumnList(list[Any]):
    """A list that is as long as the batch, and has an entry for each value."""


class ColumnTuple(tuple[Any, ...]):
    """A tuple that is as long as the batch, and has an entry for each value."""


class UncuttableList(list[Any]):
    """A list with the entries of all samples, several of some and none of others."""


class UncuttableTuple(tuple[Any, ...]):
    """A tuple with the entries of all samples, several of some and none of others."""


_SAMPLES = (SampleList, SampleTuple)
_COLUMNS = (ColumnList, ColumnTuple)
_UNCUTTABLE = (UncuttableList, UncuttableTuple)
_CONTAINERS = containers()
_AROUND_SAMPLES = containers(stop=lambda cls: issubclass(cls, _SAMPLES))
_OUTSIDE_LISTS = containers(
    stop=lambda cls: issubclass(cls, list) or (issubclass(cls, tuple) and not hasattr(cls, "_fields"))
)


class _IdentitySet:
    """A set of objects by identity: tensors have no other equality."""

    def __init__(self) -> None:
        self._weak: WeakValueDictionary[int, Any] = WeakValueDictionary()
        # Dicts and ranges allow no weak references. Few are kept, as they may hold tensors:
        # test_a_batch_is_freed_before_the_next_one_is_made.
        self._strong: deque[Any] = deque(maxlen=_BATCHES)

    def add(self, value: Any) -> None:
        try:
            self._weak[id(value)] = value
        except TypeError:
            self._strong.append(value)

    def __contains__(self, value: object) -> bool:
        # A new object may have the id of a dead one, so identity decides. The default is not None: batches
        # hold None, too.
        found = self._weak.get(id(value), self)
        return found is value or any(each is value for each in self._strong)


class LoadedBatches:
    """Records of the values in the last batches of a session's loaders.

    Attributes:
        rows: Values with a row for each sample.
        whole: Values with the same shape for any number of samples.
        uncuttable: Values that hold several samples and cannot be cut into them.
        counts: The numbers of samples in the batches.
        shapes: For each batch, the shapes of whole values that are as long as the batch by chance.
        computing: The places that compute a part of a batch now, by a token for each. Threads of the model
            look here, too, so it is not thread-local.
    """

    def __init__(self) -> None:
        self.rows, self.whole, self.uncuttable = _IdentitySet(), _IdentitySet(), _IdentitySet()
        self.counts: deque[int] = deque(maxlen=_BATCHES)
        self.shapes: deque[set[tuple[int, ...]]] = deque(maxlen=_BATCHES)
        self.computing: dict[object, str] = {}

    @contextmanager
    def computing_part(self, where: str) -> Iterator[None]:
        # A token each, and no flag: forwards of several models, and in threads of the step, overlap.
        token = object()
        self.computing[token] = where
        try:
            yield
        finally:
            del self.computing[token]

    def __reduce__(self) -> tuple[type["LoadedBatches"], tuple[()]]:
        return LoadedBatches, ()  # for copies of a prepared model: its batches are not theirs


class CountingCollate:
    """Collate function that counts its samples; a class, as a loader's workers get it by pickle.

    It collates the first batch of several samples twice: whole, and from copies of half of the samples.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn
        self._layout: Layout | None = None

    def __call__(self, items: list[Any]) -> Envelope:
        other = None
        if self._layout is None and isinstance(items, list) and len(items) > 1:
            self._layout = {}
            other = self._collate_other_size(items)
        batch = self.collate_fn(items)
        if other is not None:
            counts = _count_samples(batch, len(items)), _count_samples(*other)
            self._layout = dict(_compare_layouts(batch, other[0], counts, ()))
        return Envelope(batch, len(items), self._layout)

    def _collate_other_size(self, items: list[Any]) -> tuple[Any, int] | None:
        """Return a batch of half of the samples, or of twice as many, and that number; ``None`` if both fail.

        It leaves random generators unchanged, and the samples, to which some functions write.
        """
        for some in (items[: len(items) // 2], items + items):
            try:
                copies = copy.deepcopy(some)
            except Exception:  # noqa: BLE001 - of open files, say
                copies = some
            with seeded(0):
                try:
                    return self.collate_fn(copies), len(copies)
                except Exception as error:  # noqa: BLE001 - it may refuse such a number of items
                    reason = repr(error)
        log.warning(
            "collate_fn takes no other number of samples than %d (%s), so that what is as long as the batch "
            "is taken to have an entry for each sample",
            len(items),
            reason,
        )
        return None


def _compare_layouts(
    value: Any, half: Any, counts: tuple[int, int], path: Path
) -> Iterator[tuple[Path, tuple[bool, ...] | None]]:
    """Yield the path of each value, and which dimensions differ between batches of two sizes."""
    if type(value) is not type(half):
        return
    shape, other = _shape(value), _shape(half)
    if shape is not None and other is not None:
        follows = tuple(pair == counts for pair in zip(shape, other, strict=False))
        yield path, None if shape == other else follows if any(follows) else ()
        if follows == (True,):
            return
    container = _CONTAINERS[type(value)]
    if container is not None:
        labels = container.labels(value), container.labels(half)
        children = container.children(value), container.children(half)
        for name, its_name, child, fewer in zip(*labels, *children, strict=False):
            if name == its_name:
                yield from _compare_layouts(child, fewer, counts, (*path, name))


class Marker:
    """Recorder of the values in a loader's batches that have an entry for each sample."""

    def __init__(self, dim: int, batches: LoadedBatches) -> None:
        self._dim = dim
        self._batches = batches
        self._layout: Layout = {}

    def mark(self, batch: Any, samples: int, layout: Layout | None) -> Any:
        """Return a batch of this many samples with its lists of samples marked."""
        if layout:
            self._layout = layout
        samples = _count_samples(batch, samples)
        self._batches.counts.append(samples)
        self._batches.shapes.append(set())
        return self._mark(batch, samples, ())

    def _mark(self, value: Any, samples: int, path: Path) -> Any:
        container = _CONTAINERS[type(value)]
        follows = self._layout.get(path, ())
        if container is None:
            self._note(value, samples, follows, is_known=path in self._layout)
            return value
        is_of_samples = follows == (True,)
        if is_sequence(value):
            if path not in self._layout:
                is_of_samples = len(value) == samples and are_samples(value, samples, self._dim) is True
            if is_of_samples:
                return _mark_as(_SAMPLES, value)
            if value and path in self._layout and follows == () and not _has_length(value, samples):
                return _mark_as(_UNCUTTABLE, value)
        elif is_of_samples and isinstance(value, Mapping):
            self._batches.uncuttable.add(value)
            return value
        children = list(container.children(value))
        marked = [
            self._mark(child, samples, (*path, name))
            for name, child in zip(container.labels(value), children, strict=True)
        ]
        if follows is None and len(value) == samples and type(value) in {list, tuple}:
            return _mark_as(_COLUMNS, marked if type(value) is list else tuple(marked))
        is_same = all(new is old for new, old in zip(marked, children, strict=True))
        return value if is_same else container.rebuild(value, marked)

    def _note(self, value: Any, samples: int, follows: tuple[bool, ...] | None, *, is_known: bool) -> None:
        batches, dim = self._batches, self._dim
        shape = _shape(value)
        if _is_tensor_or_array(value):
            if not shape:  # a scalar
                return
            length = length_along(value, dim)
            if follows is None:
                batches.whole.add(value)
                if length == samples:
                    batches.shapes[-1].add(shape)
            elif length == samples and (
                _is_only(dim, follows, shape, samples) if any(follows) else not is_known
            ):
                batches.rows.add(value)
            elif length is not None or is_known or samples in shape:
                batches.uncuttable.add(value)
        elif follows is not None and (
            follows == (True,)
            if isinstance(value, str | bytes | range | type)
            else shape is not None or _holds_values(value)
        ):
            batches.uncuttable.add(value)


def _mark_as(kinds: tuple[type[list[Any]], type[tuple[Any, ...]]], value: Any) -> Any:
    """Return a list or tuple as one of the classes above, so that it is known when the step gives it back."""
    return kinds[0](value) if isinstance(value, list) else kinds[1](value)


def _is_only(dim: int, follows: tuple[bool, ...], shape: tuple[int, ...], samples: int) -> bool:
    """Return whether the samples are along one dimension, and not along two, as in distances between them."""
    sizes = [n for follow, n in zip(follows, shape, strict=False) if follow]
    return follows[dim] and sizes.count(samples) == 1


def _count_samples(batch: Any, chosen: int) -> int:
    """Return how many samples a batch has: collate functions may leave out some of those that were chosen."""
    if _has_length(batch, chosen):
        return chosen
    first = next((leaf for leaf in tree_leaves(batch) if _is_tensor_or_array(leaf)), None)
    found = None if first is None else length_along(first)
    return found if found is not None and 0 < found < chosen else chosen


def _has_length(value: Any, length: int) -> bool:
    container = _CONTAINERS[type(value)]
    if container is None:
        return _is_tensor_or_array(value) and length in (_shape(value) or ())
    if is_sequence(value) and len(value) == length:
        return True
    return any(_has_length(child, length) for child in container.children(value))


def _is_tensor_or_array(value: Any) -> bool:
    return isinstance(value, Tensor | PackedSequence) or is_array(value)


def _shape(value: Any) -> tuple[int, ...] | None:
    """Return the sizes of a value that may follow the samples; ``None`` where it has none."""
    if isinstance(value, PackedSequence) or (isinstance(value, Tensor) and value.is_nested):
        return (length_along(value) or 0,)
    if isinstance(value, Tensor) or is_array(value):
        return tuple(value.shape)
    try:
        return (len(value),) if isinstance(value, Sized) and not isinstance(value, type) else None
    except Exception:  # noqa: BLE001 - a user's class; its length may not be known
        return None


def _holds_values(value: Any) -> bool:
    """Return whether an object of an unknown class may hold something of the samples."""
    kind = type(value)
    return any(hasattr(kind, name) for name in ("to", "cuda")) or any(
        isinstance(v, Tensor | list | dict) or is_array(v) for v in getattr(value, "__dict__", {}).values()
    )


def is_sequence(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields"))


def are_samples(value: Any, rows: int, dim: int) -> bool | None:
    """Return whether a sequence with as many entries as rows has one for each; ``None`` where it may have.

    Entries of several kinds, some of which have rows, are values, as in ``[inputs, targets]``. Entries of one
    kind that all have rows, as two images of each sample have in a batch of two, may be either.
    """
    have_rows = [_has_rows(entry, rows, dim) for entry in value]
    if len({_kind(entry) for entry in value}) > 1:
        return not any(have_rows)
    return None if all(have_rows) else True


def _has_rows(value: Any, rows: int, dim: int) -> bool:
    container = _CONTAINERS[type(value)]
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
    container = _CONTAINERS[type(value)]
    if container is None:
        return type(value)
    return type(value), frozenset(_kind(child) for child in islice(container.children(value), _LOOKED_AT))


Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Scattering:
    """Rules that cut arguments into parts: tensors by their rows, all else is in every part.

    A list, tuple or array as long as the rows may have an entry for each row, and would then be wrong in
    every part. It is refused, unless the records of the batch say what it is.

    Attributes:
        dim: The dimension of the rows.
        broadcast: Arguments that every part gets whole: names, or places of positional ones.
        batches: Records of the loaders' last batches, under a trainer; arrays have rows there, too.
    """

    dim: int = 0
    broadcast: frozenset[str | int] = frozenset()
    batches: LoadedBatches | None = None

    def arguments(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        most: int,
        function: Callable[..., Any] | None = None,
    ) -> tuple[list[Arguments], list[int] | None]:
        """Split whole arguments into those of at most ``most`` parts, of sizes that differ by at most one.

        Fewer rows than devices make fewer parts; arguments without tensors, or without rows, make one.

        Returns:
            The arguments of each part, and how many rows each has; ``None`` where nothing was split.
        """
        given: dict[str | int, Any] = dict(enumerate(args))
        given.update(kwargs)
        names = _names(function, len(args)) if self.broadcast else {}
        whole = {k: v for k, v in given.items() if k in self.broadcast or names.get(k) in self.broadcast}
        rest = {k: v for k, v in given.items() if k not in whole}
        sizes = self.sizes(rest, most=most)
        if len(sizes) < 2:
            return [(args, kwargs)], None
        pieces: dict[str | int, list[Any]] = {}
        done: dict[int, tuple[Any, list[Any]]] = {}
        for key, value in rest.items():
            try:
                pieces[key] = self._pieces(value, sizes, done)
            except ConfigError as error:
                name = _names(function, len(args)).get(key, key)
                msg = f"argument {name!r}: {error}"
                raise ConfigError(msg) from None
        pieces |= {k: [v] * len(sizes) for k, v in whole.items()}
        parts = [
            (tuple(pieces[i][part] for i in range(len(args))), {k: pieces[k][part] for k in kwargs})
            for part in range(len(sizes))
        ]
        return parts, sizes

    def sizes(self, value: Any, *, most: int) -> list[int]:
        rows = self.rows(value)
        return [s.stop - s.start for s in split_evenly(rows, min(most, rows))] if rows else []

    def rows(self, value: Any) -> int | None:
        """Return how many rows the tensors in ``value`` have; ``None`` if there are none.

        Tensors in lists count only where there are no others: there may be one for each sample.
        """
        for table in (_OUTSIDE_LISTS, _AROUND_SAMPLES):
            rows: int | None = None
            for leaf in tree_leaves(value, table=table):
                length = self._length(leaf)
                if rows is None:
                    rows = length
                elif length is not None and length != rows:
                    raise ConfigError(self._uneven(leaf, length, rows))
            if rows is not None:
                if (
                    table is _AROUND_SAMPLES
                    and self.batches
                    and self.batches.counts
                    and rows not in self.batches.counts
                ):
                    msg = (
                        f"tensors with {rows} rows are given in a list, and the batch has "
                        f"{self.batches.counts[-1]} samples, so that they may be one for each; give the list "
                        "as it is in the loader's batch, where that is known, or tensors with a row for each "
                        "sample"
                    )
                    raise ConfigError(msg)
                return rows
        return None

    def parts(self, value: Any, sizes: Sequence[int]) -> list[Any]:
        """Return one value for each size; the pieces of tensors are views."""
        return self._pieces(value, sizes, {})

    def _pieces(self, value: Any, sizes: Sequence[int], done: dict[int, tuple[Any, list[Any]]]) -> list[Any]:
        if id(value) in done:
            return done[id(value)][1]
        rows, container = sum(sizes), _AROUND_SAMPLES[type(value)]
        if isinstance(value, _UNCUTTABLE) or (self.batches is not None and value in self.batches.uncuttable):
            raise ConfigError(self._uncut(value))
        if isinstance(value, _SAMPLES):
            if len(value) != rows:
                raise ConfigError(self._uneven(value, len(value), rows))
            ends = zip(sizes, accumulate(sizes), strict=True)
            pieces = [type(value)(value[end - size : end]) for size, end in ends]
        elif container is None:
            pieces = self._leaf(value, sizes)
        elif is_sequence(value) and len(value) == rows and self._is_refused(value, rows):
            raise ConfigError(self._as_long_as_the_batch(value))
        else:
            children = list(container.children(value))
            columns = [self._pieces(child, sizes, done) for child in children]
            pieces = [
                value
                if all(column[i] is child for column, child in zip(columns, children, strict=True))
                else container.rebuild(value, [column[i] for column in columns])
                for i in range(len(sizes))
            ]
        done[id(value)] = value, pieces  # with the value, which keeps its id its own
        return pieces

    def _leaf(self, value: Any, sizes: Sequence[int]) -> list[Any]:
        rows, length = sum(sizes), self._length(value)
        if length is None:
            if self.batches is None and is_array(value) and length_along(value) == rows:
                raise ConfigError(self._as_long_as_the_batch(value))
            return [value] * len(sizes)
        if length != rows:
            raise ConfigError(self._uneven(value, length, rows))
        if self.batches is not None and value not in self.batches.rows:
            shape = getattr(value, "shape", None)
            if shape is not None and any(tuple(shape) in shapes for shapes in self.batches.shapes):
                raise ConfigError(self._as_long_as_the_batch(value))
        return list(split_rows(value, sizes, self.dim))

    def _length(self, leaf: Any) -> int | None:
        if isinstance(leaf, _SAMPLES):
            return len(leaf)
        if self.batches is None:
            return None if is_array(leaf) else length_along(leaf, self.dim)
        return None if leaf in self.batches.whole else length_along(leaf, self.dim)

    def _is_refused(self, value: Any, rows: int) -> bool:
        if isinstance(value, _COLUMNS):
            return False
        kind = are_samples(value, rows, self.dim)
        return kind is True or (kind is None and isinstance(value, list))

    def _uneven(self, leaf: Any, length: int, rows: int) -> str:
        what = f"a {type(leaf).__name__} of {length}"
        if isinstance(leaf, Tensor) and not leaf.is_nested:
            what = f"shape {tuple(leaf.shape)}"
        return (
            f"all tensors must have the same number of rows along dim {self.dim}, got {rows} and {length} "
            f"({what}); tensors that belong to no row can be buffers of the module, be named to go to each "
            f"device whole, {self._naming()}, or scattered by hand with inputs_are_scattered=True"
        )

    def _uncut(self, value: Any) -> str:
        if not isinstance(value, Tensor) and not is_array(value):
            kind = type(value).__name__.replace("UncuttableList", "list").replace("UncuttableTuple", "tuple")
            return (
                f"it is a {kind} of the batch, and it is not known how to cut it into "
                "samples; let collate_fn return tensors, arrays and lists with an entry for each, or name "
                f"the argument to give all of it to each device: {self._naming()}"
            )
        kind = "tensor" if isinstance(value, Tensor) else "array"
        samples = self.batches.counts[-1] if self.batches else 0
        return (
            f"it is a {kind} of shape {tuple(value.shape)}, and the batch's samples are not along its dim "
            f"{self.dim}, or not there alone (there {'is' if samples == 1 else 'are'} {samples}); let "
            "collate_fn return a row for each sample, padded or in lists, choose their dimension: "
            'options={"dp-gather": {"dim": ...}}, or take Trainer(backend="tuple"), which collates the '
            "samples of each device apart; a dataset that makes batches itself goes with "
            "DataLoader(batch_size=None)"
        )

    def _as_long_as_the_batch(self, value: Any) -> str:
        what, length = type(value).__name__, len(value)
        instead = (
            "give it as it is in the loader's batch, where it is known to have an entry for each sample"
            if self.batches is not None
            else "give a tensor, or scatter by hand with inputs_are_scattered=True"
        )
        return (
            f"it is a {what} of {length}, and there are as many rows, so that each device may need "
            f"its own entries of it: {instead}; or name the argument to give all of it to each "
            f"device: {self._naming()}"
        )

    def _naming(self) -> str:
        option = 'broadcast=("name",)'
        return option if self.batches is None else 'options={"dp-gather": {"broadcast": ("name",)}}'


def _names(function: Callable[..., Any] | None, count: int) -> dict[str | int, str]:
    """Return the names of the first positional arguments of a function, by their places."""
    try:
        parameters = [] if function is None else list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C
        return {}
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {i: p.name for i, p in enumerate(parameters[:count]) if p.kind not in several}


def split_scattered(args: tuple[Any, ...], kwargs: dict[str, Any], *, most: int) -> list[Arguments]:
    """Turn arguments that are tuples of parts into the arguments of each part.

    Arguments that are neither tensors nor tuples nor lists (flags, numbers, ``None``) go to every
    part.
    """
    named = [
        *((f"argument {i}", a) for i, a in enumerate(args)),
        *((f"argument {k!r}", a) for k, a in kwargs.items()),
    ]
    count: int | None = None
    for name, arg in named:
        if isinstance(arg, Tensor | PackedSequence):
            what = f"tensor of shape {tuple(arg.shape)}" if isinstance(arg, Tensor) else "PackedSequence"
            msg = (
                f"with inputs_are_scattered=True {name} must be a tuple or list with one part per device, "
                f"got a {what}"
            )
            raise ConfigError(msg)
        if not isinstance(arg, tuple | list):
            continue
        if count is not None and len(arg) != count:
            msg = f"{name} must have {count} parts like the arguments before it, got {len(arg)}"
            raise ConfigError(msg)
        count = len(arg)
        if not 0 < count <= most:
            msg = f"{name} must have 1 to {most} parts, one per device, got {count}"
            raise ConfigError(msg)

    def part(arg: Any, i: int) -> Any:
        return arg[i] if isinstance(arg, tuple | list) else arg

    return [
        (tuple(part(a, i) for a in args), {k: part(a, i) for k, a in kwargs.items()})
        for i in range(count or 1)
    ]


class Gathering:
    """The gather of one call's outputs.

    Tensors are concatenated on the device, scalars are stacked to a vector, ``None`` stays ``None``.
    Containers are searched, and all else becomes a list with an entry per part. Where it is known how
    many rows each part had, lists and arrays with an entry for each become one. Values under a
    ``kept`` key, at any depth, become tuples of parts that stay on their devices.

    Args:
        device: The device of the result.
        dim: The dimension to concatenate along.
        kept: Keys of values that are not gathered.
        sizes: How many rows each part had, if that is known.
    """

    def __init__(
        self, device: torch.device, dim: int, kept: Collection[str], sizes: Sequence[int] | None = None
    ) -> None:
        self._device = device
        self._dim = dim
        self._kept = kept
        self._sizes = sizes
        self.keys: set[str] = set()

    def gather(self, outputs: Sequence[Any], path: str = "output") -> Any:
        """Join the parts' outputs to one output.

        Collectives: forward gathers the parts; backward scatters the output's gradient to them.
        """
        if not outputs:
            msg = "there are no outputs to gather"
            raise ConfigError(msg)
        first = outputs[0]
        if isinstance(first, Tensor):
            return self._join(outputs, path)
        if all(o is None for o in outputs):
            return None
        if isinstance(first, PackedSequence) or (is_array(first) and self._has_rows(outputs, path)):
            return self._join(outputs, path)
        container = _CONTAINERS[type(first)]
        if container is None:
            return list(outputs)
        if is_sequence(first) and self._are_samples(outputs, path):
            return type(first)(entry for output in outputs for entry in recursive_to(output, self._device))
        labels = list(container.labels(first))
        for i, other in enumerate(outputs):
            if type(other) is not type(first) or list(container.labels(other)) != labels:
                msg = (
                    f"the parts' outputs must have one structure: {path} is {_describe(first)} in part 0 "
                    f"and {_describe(other)} in part {i}; keep it in parts with except_keywords or "
                    "gather_to_one_device=False"
                )
                raise ConfigError(msg)
        names = _field_names(first)
        values = []
        for i, column in enumerate(zip(*map(container.children, outputs), strict=True)):
            name = names[i] if names is not None else None
            if isinstance(name, str):
                self.keys.add(name)
            if name in self._kept:
                values.append(tuple(column))
            else:
                values.append(self.gather(column, f"{path}[{i if name is None else name!r}]"))
        return container.rebuild(first, values)

    def _join(self, outputs: Sequence[Any], path: str) -> Any:
        kind = Tensor if isinstance(outputs[0], Tensor) else type(outputs[0])
        for i, other in enumerate(outputs):
            if not isinstance(other, kind):
                msg = (
                    f"{path} is {_describe(outputs[0])} in part 0 and {_describe(other)} in part {i}; return "
                    "one structure"
                )
                raise ConfigError(msg)
        if kind is not Tensor:
            return cat_rows(recursive_to(list(outputs), self._device), self._dim)
        moved = [to_device(output, self._device) for output in outputs]
        if moved[0].dim() == 0:
            return torch.stack(moved)
        self._has_rows(moved, path)
        return cat_rows(moved, self._dim)

    def _has_rows(self, outputs: Sequence[Any], path: str) -> bool:
        """Return whether all parts have their rows along the dimension; ``False`` for nested tensors."""
        if (
            self._sizes is None
            or len(outputs) < 2
            or (isinstance(outputs[0], Tensor) and outputs[0].is_nested)
        ):
            return False
        shapes = [tuple(output.shape) for output in outputs]
        if all(length_along(o, self._dim) == n for o, n in zip(outputs, self._sizes, strict=True)):
            others = {(*s[: self._dim], *s[self._dim + 1 :]) for s in shapes}
            where = "only their rows may differ: pad them to one length" if len(others) > 1 else None
        else:
            dims = range(min(map(len, shapes)))
            theirs = [d for d in dims if all(s[d] == n for s, n in zip(shapes, self._sizes, strict=True))]
            where = (
                f"the rows are along dim {theirs[0]}: return them along dim {self._dim}" if theirs else None
            )
            if where is None:
                return False
        if where is None:
            return True
        msg = (
            f"{path} cannot be joined along dim {self._dim}: its shapes are "
            f"{' and '.join(map(str, shapes))} for parts of {list(self._sizes)} rows, and {where}, or keep "
            "it in parts with except_keywords or gather_to_one_device=False"
        )
        raise ConfigError(msg)

    def _are_samples(self, outputs: Sequence[Any], path: str) -> bool:
        """Return whether a list or tuple has an entry for each row of its part, and not for each value."""
        sizes = self._sizes
        if sizes is None or [len(o) if is_sequence(o) else -1 for o in outputs] != list(sizes):
            return False
        if len(set(sizes)) > 1:
            return True
        kinds = {are_samples(o, n, self._dim) for o, n in zip(outputs, sizes, strict=True)}
        if True not in kinds:
            return False
        tensors = [leaf for leaf in outputs[0] if isinstance(leaf, Tensor)]
        scalars = bool(tensors) and not any(t.dim() for t in tensors)
        if isinstance(outputs[0], list) and not scalars:
            return True
        if (isinstance(outputs[0], tuple) and scalars) or any(sizes[0] in t.shape for t in tensors):
            return False  # values: a loss and a score, or rows along another dimension, refused there
        msg = (
            f"{path} is {_describe(outputs[0])} of each part, which has as many rows: it may have an entry "
            "for each of them or not: return one tensor, torch.stack(values), or keep it in parts with "
            "except_keywords or gather_to_one_device=False"
        )
        raise ConfigError(msg)


def sorted_by_device(outputs: Sequence[Any], devices: Sequence[torch.device]) -> list[Any]:
    """Return the outputs in the order of their devices' types and indices, not of ``device_ids``."""
    order = sorted(range(len(outputs)), key=lambda i: (devices[i].type, devices[i].index or 0))
    return [outputs[i] for i in order]


def _field_names(value: Any) -> list[Any] | None:
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        return None if fields is None else list(fields)
    if dataclasses.is_dataclass(value):
        return [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return None


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {list(value)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
