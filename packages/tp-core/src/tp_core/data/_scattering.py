"""The rule by which values are cut into parts: by the rows of tensors, and by what is declared.

A tensor has its rows in one dimension. For other values no length says what their entries are: a list of 8
texts beside tensors of 8 rows may have a text for each row, or be the names of 8 classes. So what is as long
as there are rows is refused until ``samples`` or ``broadcast`` names it.
"""

import inspect
import sys
import warnings
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, fields, is_dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence

from tp_core._contracts._batch import Parts
from tp_core._trees import containers, tree_leaves
from tp_core.arguments import as_names
from tp_core.data._batches import Envelope, split_evenly
from tp_core.data._rows import is_array, length_along, split_rows
from tp_core.errors import ConfigError
from tp_core.messages import those_known
from tp_core.output import get_logger

log = get_logger("tp_core")

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

Path = tuple[str | int, ...]
"""Where a value is: the name or the place of its argument, then keys, fields and positions within it."""

_CONTAINERS = containers()

# Where tensors are that say how many rows there are: the first of these that has any. A list may have an
# entry for each row, and its tensors then have rows of something else.
_OUTSIDE_LISTS, _IN_LISTS, _IN_RECORDS = range(3)

_ONE_VALUE = (str, bytes, type, torch.Size, nn.Module)  # their length is no number of entries


class _Length(NamedTuple):
    level: int
    length: int
    path: Path
    value: Any


class LoadedBatches:
    """Records of the last batches of a session's loaders.

    Args:
        dim: The dimension of the rows.

    Attributes:
        counts: The numbers of samples in the batches.
        computing: The places that compute a part of a batch now, by a token for each. Threads of the model
            look here, too, so it is not thread-local.
    """

    def __init__(self, dim: int = 0) -> None:
        self._dim = dim
        # One step may take batches of several loaders.
        self.counts: deque[int] = deque(maxlen=8)
        self.computing: dict[object, str] = {}
        # By identity, as tensors have no other equality; weak, as a batch is freed before the next is made.
        self._without_rows: WeakValueDictionary[int, Any] = WeakValueDictionary()

    def add(self, batch: Any, chosen: int) -> None:
        """Record a batch, for which so many samples were chosen."""
        samples = _count_samples(batch, chosen)
        self.counts.append(samples)
        for leaf in tree_leaves(batch):
            is_tensor = isinstance(leaf, Tensor) or is_array(leaf)
            if is_tensor and length_along(leaf, self._dim) not in {None, samples}:
                self._without_rows[id(leaf)] = leaf

    def has_other_rows(self, value: Any) -> bool:
        """Return whether a value is a tensor of a batch that has no row for each sample."""
        # A new object may have the id of a dead one.
        return self._without_rows.get(id(value)) is value

    @contextmanager
    def computing_part(self, where: str) -> Iterator[None]:
        # A token each, and no flag: forwards of several models, and in threads of the step, overlap.
        token = object()
        self.computing[token] = where
        try:
            yield
        finally:
            del self.computing[token]

    def __reduce__(self) -> tuple[type["LoadedBatches"], tuple[int]]:
        return LoadedBatches, (self._dim,)  # for copies of a prepared model: its batches are not theirs


def _count_samples(batch: Any, chosen: int) -> int:
    """Return how many samples a batch has: collate functions may leave out some of those that were chosen."""
    if _has_length(batch, chosen):
        return chosen
    lengths = (length_along(leaf) for leaf in tree_leaves(batch) if has_rows(leaf))
    first = next(lengths, None)
    if first is not None and 0 < first < chosen:
        return first
    return chosen


def _has_length(value: Any, length: int) -> bool:
    """Return whether a list, or any dimension of a tensor, is so long."""
    container = _CONTAINERS[type(value)]
    if container is None:
        if isinstance(value, PackedSequence) or (isinstance(value, Tensor) and value.is_nested):
            return length_along(value) == length
        return has_rows(value) and length in value.shape
    if is_sequence(value) and len(value) == length:
        return True
    return any(_has_length(child, length) for child in container.children(value))


def has_fewer(batch: Any, chosen: int) -> bool:
    """Return whether a batch has fewer rows than the samples that were chosen for it, and log a warning then.

    A collate function that leaves samples out does not report it. Rows are those of tensors, or the entries
    of lists: of images, say, whose own rows are channels. So the check is silent where tensors have several
    lengths, or a list has an entry for each sample; it cannot notice it where one sample is left.
    """
    if isinstance(batch, Envelope):
        batch = batch.batch
    lengths: set[int | None]
    if isinstance(batch, Parts):
        lengths = {sum(batch.counts)}
    elif _has_list(batch, chosen):
        return False
    else:
        tensors = [leaf for leaf in tree_leaves(batch) if length_along(leaf) is not None]
        if all(_has_length(tensor, chosen) for tensor in tensors):  # samples may be along another dimension
            return False
        lengths = {length_along(tensor) for tensor in tensors}
        if len(lengths) > 1:
            lengths = _lengths_of_lists(batch)
    if len(lengths) != 1:
        return False
    rows = lengths.pop()
    if rows is None or not 1 < rows < chosen:
        return False
    log.warning(
        "a batch has fewer rows than the %d samples that were chosen for it: if collate_fn leaves samples "
        "out, the batch counts as %d in means over samples, and in gradients on several ranks and where "
        "batches are accumulated; return how many it has from the step, as 'weight'",
        chosen,
        chosen,
    )
    return True


def _has_list(value: Any, length: int) -> bool:
    """Return whether a value is a list that is so long, or has one."""
    container = _CONTAINERS[type(value)]
    if container is None:
        return False
    if is_sequence(value) and len(value) == length:
        return True
    return any(_has_list(child, length) for child in container.children(value))


def _lengths_of_lists(batch: Any) -> set[int | None]:
    """Return the lengths of the lists that a batch consists of; none if it has other values, too."""
    container = _CONTAINERS[type(batch)]
    if container is None:
        return set()
    children = list(container.children(batch))
    if not all(map(is_sequence, children)):
        return set()
    return {len(child) for child in children}


def has_rows(value: Any) -> bool:
    """Return whether a value is of a kind that is cut by its rows."""
    return isinstance(value, Tensor | PackedSequence) or is_array(value)


def is_sequence(value: Any) -> bool:
    return isinstance(value, list) or (isinstance(value, tuple) and not hasattr(value, "_fields"))


def keys_of(value: Any) -> Iterable[str | int]:
    """Return the keys, fields or positions of a container's values."""
    if isinstance(value, Mapping):
        return map(str, value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return value._fields  # type: ignore[no-any-return]
    if is_dataclass(value):
        return [f.name for f in fields(value) if hasattr(value, f.name)]
    return range(len(value))


def holds_values(values: Any, rows: int, dim: int) -> bool:
    """Return whether a list as long as there are rows has an entry for each of several values all the same.

    It does if it has tensors, and all of them have these rows, as in ``[inputs, targets]``.
    """
    lengths = {length_along(leaf, dim) for leaf in tree_leaves(values) if has_rows(leaf)}
    return lengths - {None} == {rows}


def _are_records(values: Any) -> bool:
    """Return whether a list holds dicts, or the like, with the same keys, as one for each row would have."""
    kinds = set()
    for value in values:
        if is_sequence(value) or _CONTAINERS[type(value)] is None:
            return False
        kinds.add((type(value), *keys_of(value)))
    return len(kinds) == 1


def _has_entries(value: Any, count: int) -> bool:
    try:
        return isinstance(value, Sized) and len(value) == count
    except Exception:  # noqa: BLE001 - a user's class, whose length may not be known
        return False


@dataclass(frozen=True, slots=True)
class Scattering:
    """Rules that cut values into parts.

    - Tensors, arrays and packed sequences are cut by their rows, in containers, too. All have as many rows.
    - What ``samples`` names has an entry for each row, and is cut like them.
    - What ``broadcast`` names is in every part.
    - Whatever else is as long as there are rows is refused. A list is not if it holds tensors and all of them
      have these rows, as in ``[inputs, targets]``; a list of dicts with the same keys is.
    - All else is in every part.

    Attributes:
        dim: The dimension of the rows.
        samples: Names of values with an entry for each row.
        broadcast: Names of values that every part gets whole. A name is a key, field or parameter, at any
            depth, or several with dots between them, or the place of a positional argument.
        loaded: Records of the loaders' last batches, under a trainer.
        backend: The name of the backend, under a trainer.
        part: What gets a part, in words.
        instead: What errors say of batches whose samples are along another dimension.
        names: The names of positional arguments, by their places.

    Raises:
        ConfigError: ``samples`` and ``broadcast`` name the same.
    """

    dim: int = 0
    samples: frozenset[str | int] = frozenset()
    broadcast: frozenset[str | int] = frozenset()
    loaded: LoadedBatches | None = None
    backend: str = ""
    part: str = "device"
    instead: str = ""
    names: Mapping[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.samples & self.broadcast:
            names = ", ".join(sorted(map(repr, self.samples & self.broadcast)))
            msg = (
                f"samples and broadcast both name {names}; what has an entry for each row goes to samples "
                "alone"
            )
            raise ConfigError(msg)

    @classmethod
    def by_names(
        cls,
        samples: Collection[str | int] | str,
        broadcast: Collection[str | int] | str,
        *,
        dim: int = 0,
        **further: Any,
    ) -> "Scattering":
        """Return the rules by what options name; a name alone counts as a list of it."""
        split = frozenset(as_names("samples", samples))
        whole = frozenset(as_names("broadcast", broadcast))
        return cls(dim, split, whole, **further)

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
        if not self.samples and not self.broadcast:
            # Signatures are slow to read, and only options and errors need the names of arguments.
            with suppress(ConfigError):
                return self._arguments(args, kwargs, most)
        self._warn_of_unmatched(args, kwargs, function)
        named = replace(self, names=_parameter_names(function, len(args)))
        return named._arguments(args, kwargs, most)

    def _arguments(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], most: int
    ) -> tuple[list[Arguments], list[int] | None]:
        values: dict[str | int, Any] = dict(enumerate(args))
        values.update(kwargs)
        sizes = self.sizes(values, most=most)
        if len(sizes) < 2:
            return [(args, kwargs)], None
        places = range(len(args))
        parts = self.parts(values, sizes)
        return [(tuple(part[i] for i in places), {k: part[k] for k in kwargs}) for part in parts], sizes

    def sizes(self, values: Mapping[str | int, Any], *, most: int) -> list[int]:
        """Return how many rows each part has."""
        rows = self.rows(values)
        if not rows:
            return []
        return [piece.stop - piece.start for piece in split_evenly(rows, min(most, rows))]

    def rows(self, values: Mapping[str | int, Any]) -> int | None:
        """Return how many rows the values have, by their names; ``None`` if there are none."""
        lengths: list[_Length] = []
        for key, value in values.items():
            lengths += self._lengths(value, (key,), _OUTSIDE_LISTS)
        if not lengths:
            return None
        level = min(each.level for each in lengths)
        first, *others = [each for each in lengths if each.level == level]
        for other in others:
            if other.length != first.length:
                raise ConfigError(self._uneven(other.value, other.path, other.length, first.length))
        counts = [] if self.loaded is None else self.loaded.counts
        is_other_list = level == _IN_LISTS and counts and first.length not in counts
        if level == _IN_RECORDS or is_other_list:
            outer = _outermost_list(first.path) or first.path
            raise ConfigError(self._undeclared(outer, "a list, and no tensors are outside of it"))
        return first.length

    def _lengths(self, value: Any, path: Path, level: int, *, is_named: bool = False) -> Iterator[_Length]:
        if self._is_named(path, self.broadcast):
            return
        is_named = is_named or self._is_named(path, self.samples)
        if is_named:
            level = _OUTSIDE_LISTS
        container = _CONTAINERS[type(value)]
        if container is None:
            length = length_along(value, self.dim)
            if length is not None:
                yield _Length(level, length, path, value)
            return
        if is_sequence(value):
            if is_named:
                yield _Length(level, len(value), path, value)
                return
            if _are_records(value):
                own_level = _IN_RECORDS
            else:
                own_level = _IN_LISTS
            level = max(level, own_level)
        for key, child in zip(keys_of(value), container.children(value), strict=True):
            yield from self._lengths(child, (*path, key), level, is_named=is_named)

    def parts(self, values: Mapping[str | int, Any], sizes: Sequence[int]) -> list[dict[str | int, Any]]:
        """Return the values of each part, by their names; the pieces of tensors are views."""
        done: dict[int, tuple[Any, list[Any]]] = {}
        pieces = {key: self._pieces(value, sizes, (key,), done) for key, value in values.items()}
        return [{key: pieces[key][i] for key in values} for i in range(len(sizes))]

    def _pieces(
        self,
        value: Any,
        sizes: Sequence[int],
        path: Path,
        done: dict[int, tuple[Any, list[Any]]],
        *,
        is_named: bool = False,
    ) -> list[Any]:
        if self._is_named(path, self.broadcast):
            return [value] * len(sizes)
        if has_rows(value):
            # One tensor at two places stays one in each part. The value is kept, which keeps its id its own.
            if id(value) not in done:
                done[id(value)] = value, self._cut(value, sizes, path)
            return done[id(value)][1]
        rows = sum(sizes)
        names_this = self._is_named(path, self.samples)
        is_named = is_named or names_this
        container = _CONTAINERS[type(value)]
        if is_named and is_sequence(value):
            return self._cut_sequence(value, sizes, path)
        is_unclear = self._is_unclear(value, rows) and not self._names_within(value, path)
        if is_unclear and not is_named:
            what = type(value).__name__
            if not isinstance(value, Sized):
                what += " around a tensor"
            what = f"a {what} as long as the batch, which has {rows} rows"
            raise ConfigError(self._undeclared(path, what))
        if container is None:
            if is_unclear or names_this:
                msg = (
                    f"{self._dotted(path)!r} is named to have an entry for each row, and a "
                    f"{type(value).__name__} cannot be cut; make it a list, a tuple, an array or a tensor"
                )
                raise ConfigError(msg)
            return [value] * len(sizes)
        children = list(container.children(value))
        columns = [
            self._pieces(child, sizes, (*path, key), done, is_named=is_named)
            for key, child in zip(keys_of(value), children, strict=True)
        ]
        pieces = []
        for i in range(len(sizes)):
            own = [column[i] for column in columns]
            is_same = all(new is old for new, old in zip(own, children, strict=True))
            if is_same:
                piece = value
            else:
                piece = container.rebuild(value, own)
            pieces.append(piece)
        return pieces

    def _cut(self, value: Any, sizes: Sequence[int], path: Path) -> list[Any]:
        if not isinstance(value, PackedSequence) and not value.ndim:
            return [value] * len(sizes)
        rows = sum(sizes)
        length = length_along(value, self.dim)
        if self.loaded is not None and self.loaded.has_other_rows(value):
            raise ConfigError(self._other_rows(value, path, self.loaded.counts[-1]))
        if length != rows:
            raise ConfigError(self._uneven(value, path, length, rows))
        pieces = list(split_rows(value, sizes, self.dim))
        if isinstance(value, Tensor) and value.layout is torch.strided and not value.requires_grad:
            # Views have one version for all rows, by which autograd would refuse the parts of a module that
            # changes its input in place: its own rows, as on one device. `data` has a version of its own.
            pieces = [piece.data for piece in pieces]
        return pieces

    def _cut_sequence(self, value: Any, sizes: Sequence[int], path: Path) -> list[Any]:
        rows = sum(sizes)
        if len(value) != rows:
            raise ConfigError(self._uneven(value, path, len(value), rows))
        ends = accumulate(sizes)
        pieces = [value[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        container = _CONTAINERS[type(value)]
        if container is None:
            return pieces
        return [container.rebuild(value, list(piece)) for piece in pieces]

    def _is_unclear(self, value: Any, rows: int) -> bool:
        """Return whether a value may have an entry for each row, and may not."""
        if isinstance(value, _ONE_VALUE):
            return False
        if is_sequence(value):
            if len(value) != rows:
                return False
            return _are_records(value) or not holds_values(value, rows, self.dim)
        if isinstance(value, Mapping):
            return len(value) == rows and not any(map(has_rows, tree_leaves(value)))
        if _CONTAINERS[type(value)] is not None:
            return False  # fields have names
        return _has_entries(value, rows) or self._holds_rows(value, rows)

    def _holds_rows(self, value: Any, rows: int) -> bool:
        attributes = getattr(value, "__dict__", {}).values()
        return any(has_rows(each) and length_along(each, self.dim) == rows for each in attributes)

    # -- names ---------------------------------------------------------------------------------------

    def _is_named(self, path: Path, names: frozenset[str | int]) -> bool:
        if not names:
            return False
        if len(path) == 1 and path[0] in names:
            return True
        dotted = f".{self._dotted(path)}"
        return any(isinstance(name, str) and dotted.endswith(f".{name}") for name in names)

    def _names_within(self, value: Any, path: Path) -> bool:
        """Return whether an option names something in a container, which then has values, and no samples."""
        container = _CONTAINERS[type(value)]
        if container is None or not (self.samples or self.broadcast):
            return False
        for key, child in zip(keys_of(value), container.children(value), strict=True):
            inner = (*path, key)
            if self._is_named(inner, self.samples) or self._is_named(inner, self.broadcast):
                return True
            if self._names_within(child, inner):
                return True
        return False

    def _warn_of_unmatched(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], function: Callable[..., Any] | None
    ) -> None:
        """Warn of what ``samples`` or ``broadcast`` names and no argument has; a later call may have it."""
        parameters = _parameter_names(function, sys.maxsize)
        named = replace(self, names=parameters)
        values: list[tuple[str | int, Any]] = [*enumerate(args), *kwargs.items()]

        def paths() -> Iterator[Path]:
            yield from ((place,) for place in parameters)
            for key, value in values:
                yield from _paths(value, (key,))

        for option in ("samples", "broadcast"):
            for name in getattr(self, option):
                # Most name a parameter: then no value is gone through.
                if any(named._is_named(path, frozenset({name})) for path in paths()):
                    continue
                known = [
                    *parameters.values(),
                    *(str(path[-1]) for path in paths() if isinstance(path[-1], str)),
                ]
                hint = those_known(str(name), list(dict.fromkeys(known))[:_MOST_NAMES])
                problem = f"{option} names {name!r}, and no argument is called so, nor a key{hint}"
                warnings.warn(problem, stacklevel=5)

    def _dotted(self, path: Path) -> str:
        first, *rest = path
        if isinstance(first, int):
            first = self.names.get(first, first)
        return ".".join(map(str, (first, *rest)))

    # -- messages ------------------------------------------------------------------------------------

    def _option(self, option: str, path: Path) -> str:
        first = path[0]
        is_place = len(path) == 1 and isinstance(first, int) and first not in self.names
        if is_place:
            name = f"({first},)"
        else:
            name = f'("{self._dotted(path)}",)'
        if not self.backend:
            return f"{option}={name}"
        return f'options={{"{self.backend}": {{"{option}": {name}}}}}'

    def _undeclared(self, path: Path, what: str) -> str:
        return (
            f"{self._dotted(path)!r} is {what}, so that it may have an entry for each row; say which it is: "
            f"{self._option('samples', path)} splits it, and {self._option('broadcast', path)} gives all of "
            f"it to each {self.part}"
        )

    def _uneven(self, value: Any, path: Path, length: int | None, rows: int) -> str:
        what = f"a {type(value).__name__} of {length}"
        if isinstance(value, Tensor) and not value.is_nested:
            what = f"shape {tuple(value.shape)}"
        return (
            "all tensors, and what samples= names, must have the same number of rows along dim "
            f"{self.dim}, got {rows} and {length or 'none'} ({self._dotted(path)!r}: {what}); "
            f"{self._remedy(path)}"
        )

    def _other_rows(self, value: Any, path: Path, samples: int) -> str:
        kind = "a tensor" if isinstance(value, Tensor) else "an array"
        return (
            f"{self._dotted(path)!r} is {kind} of shape {tuple(value.shape)} in the loader's batch, and the "
            f"batch's samples are not along its dim {self.dim} (the last batch has {samples}); "
            f"{self._remedy(path)}; if it belongs to the samples, let collate_fn return a row for each, "
            f"padded or in lists, {self.instead}; a dataset that makes batches itself goes with "
            "DataLoader(batch_size=None)"
        )

    def _remedy(self, path: Path) -> str:
        remedy = f"what each {self.part} needs whole is named: {self._option('broadcast', path)}"
        outer = _outermost_list(path)
        if outer is None:
            return remedy
        return f"{remedy}; so is a list with an entry for each row: {self._option('samples', outer)}"


def _outermost_list(path: Path) -> Path | None:
    """Return the path of the outermost list around a value; ``None`` if there is none."""
    positions = [i for i, key in enumerate(path) if i > 0 and isinstance(key, int)]
    if positions:
        return path[: positions[0]]
    return None


_MOST_NAMES = 20  # in a sentence


def _paths(value: Any, path: Path) -> Iterator[Path]:
    """Yield the paths of a value and of all that is in it."""
    yield path
    container = _CONTAINERS[type(value)]
    if container is not None:
        for key, child in zip(keys_of(value), container.children(value), strict=True):
            yield from _paths(child, (*path, key))


def _parameter_names(function: Callable[..., Any] | None, count: int) -> dict[int, str]:
    """Return the names of the first positional arguments of a function, by their places."""
    try:
        if function is None:
            parameters = []
        else:
            parameters = list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # written in C
        return {}
    several = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    return {i: p.name for i, p in enumerate(parameters[:count]) if p.kind not in several}
