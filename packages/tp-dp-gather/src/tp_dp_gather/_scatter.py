"""From whole arguments to the arguments of each part."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from tp_core import tree_leaves
from tp_core.errors import ConfigError
from tp_core.internal import containers, cut_rows, is_array, length_along, split_evenly

from tp_dp_gather._samples import Columns, Known, SampleList, SampleTuple, Uncut, are_samples, is_sequence

__all__ = ["Arguments", "Scattering", "split_scattered"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]

_MARKED = (SampleList, SampleTuple)
_TABLE = containers(stop=lambda cls: issubclass(cls, _MARKED))
_OUTSIDE_LISTS = containers(
    stop=lambda cls: issubclass(cls, list) or (issubclass(cls, tuple) and not hasattr(cls, "_fields"))
)


@dataclass(frozen=True, slots=True)
class Scattering:
    """How arguments are cut into parts: tensors by their rows, all else is in every part.

    A list, tuple or array that is as long as there are rows would be wrong in every part, if it has an entry
    for each row: so it is refused, unless it is known what it is.

    Attributes:
        dim: The dimension of the rows.
        broadcast: Arguments that every part gets whole: names, or places of positional ones.
        known: What is known of the loaders' last batches, under a trainer: arrays have rows there, too.
    """

    dim: int = 0
    broadcast: frozenset[str | int] = frozenset()
    known: Known | None = None

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

        Args:
            args: Positional arguments.
            kwargs: Keyword arguments.
            most: How many parts there may be.
            function: What gets them, for the names of positional ones.

        Returns:
            The arguments of each part, and how many rows each has; ``None`` where nothing was split.

        Raises:
            ConfigError: Tensors have different numbers of rows, or a value may have an entry for each.
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
        """Return how many rows each of at most ``most`` parts gets; an empty list where there are none.

        Raises:
            ConfigError: Tensors have different numbers of rows.
        """
        rows = self.rows(value)
        return [s.stop - s.start for s in split_evenly(rows, min(most, rows))] if rows else []

    def rows(self, value: Any) -> int | None:
        """Return how many rows the tensors in ``value`` have; ``None`` if there are none.

        What lists hold is asked where there is nothing else: it may be a tensor for each sample.

        Raises:
            ConfigError: Tensors have different numbers of rows.
        """
        for table in (_OUTSIDE_LISTS, _TABLE):
            rows: int | None = None
            for leaf in tree_leaves(value, table=table):
                length = self._length(leaf)
                if rows is None:
                    rows = length
                elif length is not None and length != rows:
                    raise ConfigError(self._uneven(leaf, length, rows))
            if rows is not None:
                if table is _TABLE and self.known and self.known.counts and rows not in self.known.counts:
                    raise ConfigError(_in_a_list(rows, self.known.counts[-1]))
                return rows
        return None

    def parts(self, value: Any, sizes: Sequence[int]) -> list[Any]:
        """Return one value for each size; the pieces of tensors are views.

        Raises:
            ConfigError: As in :meth:`arguments`.
        """
        return self._pieces(value, sizes, {})

    def _pieces(self, value: Any, sizes: Sequence[int], done: dict[int, tuple[Any, list[Any]]]) -> list[Any]:
        if id(value) in done:
            return done[id(value)][1]
        rows, container = sum(sizes), _TABLE[type(value)]
        if isinstance(value, Uncut) or (self.known is not None and value in self.known.uncut):
            raise ConfigError(self._uncut(value))
        if isinstance(value, _MARKED):
            if len(value) != rows:
                raise ConfigError(self._uneven(value, len(value), rows))
            pieces = [type(value)(piece) for piece in _cut(value, sizes)]
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
        done[id(value)] = value, pieces  # with the value: ids are of objects that live
        return pieces

    def _leaf(self, value: Any, sizes: Sequence[int]) -> list[Any]:
        rows, length = sum(sizes), self._length(value)
        if length is None:
            if self.known is None and is_array(value) and length_along(value) == rows:
                raise ConfigError(self._as_long_as_the_batch(value))
            return [value] * len(sizes)
        if length != rows:
            raise ConfigError(self._uneven(value, length, rows))
        if self.known is not None and value not in self.known.rows:
            shape = getattr(value, "shape", None)
            if shape is not None and any(tuple(shape) in shapes for shapes in self.known.shapes):
                raise ConfigError(self._as_long_as_the_batch(value))
        return list(cut_rows(value, sizes, self.dim))

    def _length(self, leaf: Any) -> int | None:
        if isinstance(leaf, _MARKED):
            return len(leaf)
        if self.known is None:
            return None if is_array(leaf) else length_along(leaf, self.dim)
        return None if leaf in self.known.whole else length_along(leaf, self.dim)

    def _is_refused(self, value: Any, rows: int) -> bool:
        if isinstance(value, Columns):
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
            return (
                f"it is a {_kind(value)} of the batch, and it is not known how to cut it into "
                "samples; let collate_fn return tensors, arrays and lists with an entry for each, or name "
                f"the argument to give all of it to each device: {self._naming()}"
            )
        kind = "tensor" if isinstance(value, Tensor) else "array"
        samples = self.known.counts[-1] if self.known else 0
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
            if self.known is not None
            else "give a tensor, or scatter by hand with inputs_are_scattered=True"
        )
        return (
            f"it is a {what} of {length}, and there are as many rows, so that each device may need "
            f"its own entries of it: {instead}; or name the argument to give all of it to each "
            f"device: {self._naming()}"
        )

    def _naming(self) -> str:
        option = 'broadcast=("name",)'
        return option if self.known is None else 'options={"dp-gather": {"broadcast": ("name",)}}'


def _kind(value: Any) -> str:
    if isinstance(value, list):
        return "list"
    name = type(value).__name__
    return name.removeprefix("_Uncut").lower() if name.startswith("_Uncut") else name


def _in_a_list(rows: int, samples: int) -> str:
    return (
        f"tensors with {rows} rows are given in a list, and the batch has {samples} samples, so that they "
        "may be one for each; give the list as it is in the loader's batch, where that is known, or tensors "
        "with a row for each sample"
    )


def _cut(value: Sequence[Any], sizes: Sequence[int]) -> Iterator[Sequence[Any]]:
    first = 0
    for size in sizes:
        yield value[first : first + size]
        first += size


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

    Raises:
        ConfigError: A tensor stands where parts are expected, or the numbers of parts differ.
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
