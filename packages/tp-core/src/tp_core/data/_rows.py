"""Values with one row for each sample: their length, their split into parts, and their concatenation."""

import sys
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from tp_core.errors import ConfigError

# The values are dense, nested or COO-sparse tensors, packed sequences (each sequence is a row), and arrays.


_LAYOUTS = (torch.strided, torch.jagged, torch.sparse_coo)


def is_array(value: Any) -> bool:
    """Return whether a value is an array of numpy, without importing numpy."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray)


def length_along(value: Any, dim: int = 0) -> int | None:
    """Return the number of rows of a tensor, packed sequence or array along ``dim``; ``None`` for others.

    Example:
        >>> length_along(torch.ones(3, 2)), length_along("text")
        (3, None)
    """
    if isinstance(value, PackedSequence):
        return int(value.batch_sizes[0])
    if isinstance(value, Tensor):
        # Not its shape, which a nested tensor does not have.
        if value.ndim > dim:
            return int(value.size(dim))
        return None
    if is_array(value):
        if value.ndim > dim:
            return int(value.shape[dim])
        return None
    return None


def split_rows(value: Any, sizes: Sequence[int], dim: int = 0) -> Sequence[Any]:
    """Cut a value into pieces of the given numbers of rows; gradients flow back through tensors.

    Raises:
        ConfigError: A tensor has a layout that cannot be cut into rows.
    """
    if type(value) is Tensor and value.layout is torch.strided and not value.is_nested:
        return torch.split(value, list(sizes), dim)
    cuts = list(pairwise(accumulate(sizes, initial=0)))
    if isinstance(value, PackedSequence):
        rows = unpack_sequence(value)
        is_sorted = value.sorted_indices is None
        return [pack_sequence(rows[a:b], enforce_sorted=is_sorted) for a, b in cuts]
    if not isinstance(value, Tensor):
        return [value[(slice(None),) * dim + (slice(a, b),)] for a, b in cuts]
    _check_layout(value)
    if value.is_nested:
        tensors = value.unbind()
        return [torch.nested.as_nested_tensor(list(tensors[a:b]), layout=value.layout) for a, b in cuts]
    if value.layout is torch.sparse_coo:
        return [value.index_select(dim, torch.arange(a, b, device=value.device)) for a, b in cuts]
    return torch.split(value, list(sizes), dim)


def cat_rows(values: Sequence[Any], dim: int = 0) -> Any:
    """Concatenate values by their rows, as the inverse of `split_rows`.

    Raises:
        ConfigError: A tensor has a layout that cannot be joined.
    """
    first = values[0]
    if len(values) == 1:
        return first
    if isinstance(first, PackedSequence):
        rows = [row for packed in values for row in unpack_sequence(packed)]
        is_sorted = all(packed.sorted_indices is None for packed in values)
        falls = all(len(a) >= len(b) for a, b in pairwise(rows))
        return pack_sequence(rows, enforce_sorted=is_sorted and falls)
    if not isinstance(first, Tensor):
        return sys.modules["numpy"].concatenate(list(values), dim)
    for value in values:
        _check_layout(value)
    if first.is_nested:
        tensors = [tensor for value in values for tensor in value.unbind()]
        return torch.nested.as_nested_tensor(tensors, layout=first.layout)
    return torch.cat(list(values), dim)


def take_rows(value: Any, place: Sequence[int]) -> Any:
    """Return a value with its rows in another order: row ``place[i]`` becomes row ``i``."""
    if isinstance(value, PackedSequence) or (isinstance(value, Tensor) and value.is_nested):
        rows = split_rows(value, [1] * len(place))
        return cat_rows([rows[i] for i in place])
    if isinstance(value, Tensor):
        return value[torch.tensor(place, device=value.device)]
    return value[list(place)]


def _check_layout(value: Tensor) -> None:
    if value.layout not in _LAYOUTS:
        msg = (
            f"a tensor of layout {value.layout} cannot be cut into rows, or joined from them; make it sparse "
            "in coordinates (.to_sparse_coo()) or dense (.to_dense())"
        )
        raise ConfigError(msg)
