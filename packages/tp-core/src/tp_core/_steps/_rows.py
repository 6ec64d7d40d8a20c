"""What a step returned for its samples, in rows that are joined and not averaged."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence

from tp_core._data._cutting import join_cut, length_along, take_rows
from tp_core._data._parts import Parts
from tp_core.errors import StepError

__all__ = ["SampleRows", "join_rows", "joined_over_parts", "row_count"]


@dataclass(frozen=True, slots=True)
class SampleRows:
    """A value of a step's output that has rows: the arguments of a metric, or predictions.

    Rows are those of tensors and arrays along their first dimension, and the entries of lists; mappings
    and tuples contain such.

    Attributes:
        pieces: The values, which follow each other in the order of the data.
    """

    pieces: tuple[Any, ...]


def joined_over_parts(values: Sequence[SampleRows], parts: Parts, device: torch.device) -> SampleRows:
    """Return what the step would have returned for the whole batch.

    Values without a row for each sample of their part, such as sums or the tokens of all samples, cannot
    be put into another order; they stay one piece for each part.

    Args:
        values: What the step returned for each part.
        parts: What was split.
        device: Where tensors go.
    """
    pieces = [_mapped(lambda t: t.to(device), piece) for value in values for piece in value.pieces]
    if [row_count(piece) for piece in pieces] != list(parts.counts):
        return SampleRows(tuple(pieces))
    joined = join_rows(pieces)
    if parts.order is not None:
        place = sorted(range(len(parts.order)), key=parts.order.__getitem__)
        joined = _taken(joined, place)
    return SampleRows((joined,))


def row_count(value: Any) -> int | None:
    """Return how many rows all of ``value`` has; ``None`` where there are none, or not as many everywhere."""
    lengths = {_length(leaf) for leaf in _leaves(value)}
    return lengths.pop() if len(lengths) == 1 else None


def join_rows(values: Sequence[Any]) -> Any:
    """Return one value with the rows of all, one after the other.

    Example:
        >>> join_rows([{"name": ["a", "b"]}, {"name": ["c"]}])
        {'name': ['a', 'b', 'c']}

    Raises:
        StepError: The values are not built alike, or hold something without rows.
    """
    first = values[0]
    kinds = {Tensor if isinstance(v, Tensor) else type(v) for v in values}
    if len(kinds) == 1 and all(length_along(v) is not None for v in values):
        return join_cut(values)
    if all(isinstance(v, list) for v in values):
        return [entry for value in values for entry in value]
    if all(isinstance(v, Mapping) and v.keys() == first.keys() for v in values):
        return {key: join_rows([v[key] for v in values]) for key in first}
    if all(isinstance(v, tuple) and len(v) == len(first) for v in values):
        return _like(first, [join_rows(entries) for entries in zip(*values, strict=True)])
    if all(v is None for v in values):
        return None
    described = sorted({_describe(v) for v in values})
    msg = (
        "values of several batches or parts are joined by their rows: give tensors, arrays or lists with "
        f"one row for each sample, alone or in dicts and tuples, and the same ones each time; got {described}"
    )
    raise StepError(msg)


def _taken(value: Any, place: list[int]) -> Any:
    """Return ``value`` with its rows in another order."""
    if length_along(value) is not None:
        return take_rows(value, place)
    if isinstance(value, list):
        return [value[i] for i in place]
    if isinstance(value, Mapping):
        return {key: _taken(v, place) for key, v in value.items()}
    if isinstance(value, tuple):
        return _like(value, [_taken(v, place) for v in value])
    return value


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return ``value`` with ``function`` applied to its tensors, those in the entries of lists too."""
    if isinstance(value, Tensor | PackedSequence):
        return function(value)
    if isinstance(value, list):
        return [_mapped(function, v) for v in value]
    if isinstance(value, Mapping):
        return {key: _mapped(function, v) for key, v in value.items()}
    if isinstance(value, tuple):
        return _like(value, [_mapped(function, v) for v in value])
    return value


def _leaves(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return [leaf for v in value.values() for leaf in _leaves(v)]
    if isinstance(value, tuple) and not isinstance(value, PackedSequence):
        return [leaf for v in value for leaf in _leaves(v)]
    return [] if value is None else [value]


def _length(leaf: Any) -> int | None:
    return len(leaf) if isinstance(leaf, list) else length_along(leaf)


def _like(first: tuple[Any, ...], entries: list[Any]) -> tuple[Any, ...]:
    make = getattr(type(first), "_make", tuple)  # named tuples have it
    result: tuple[Any, ...] = make(entries)
    return result


def _describe(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"a tensor of {value.dim()} dimensions"
    if isinstance(value, Mapping):
        return f"a dict of {sorted(map(str, value))}"
    if isinstance(value, tuple):
        return f"a tuple of {len(value)}"
    return type(value).__name__
