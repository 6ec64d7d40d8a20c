"""From whole arguments to the arguments of each part."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from tp_core import tree_leaves, tree_map
from tp_core.errors import ConfigError
from tp_core.internal import split_evenly

__all__ = ["Arguments", "rows_of", "scatter", "scatter_arguments", "sizes_of", "split_scattered"]

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


def rows_of(value: Any, dim: int) -> int | None:
    """Return how many rows the tensors in ``value`` have along ``dim``; ``None`` if there are none.

    Raises:
        ConfigError: Tensors have different numbers of rows.
    """
    rows: int | None = None
    for leaf in tree_leaves(value):
        if not isinstance(leaf, Tensor) or leaf.dim() <= dim:
            continue
        if rows is None:
            rows = leaf.shape[dim]
        elif leaf.shape[dim] != rows:
            msg = (
                f"all tensors must have the same number of rows along dim {dim}, got {rows} and "
                f"{leaf.shape[dim]} (shape {tuple(leaf.shape)}); tensors that belong to no row can be "
                "buffers of the module, or scattered by hand with inputs_are_scattered=True"
            )
            raise ConfigError(msg)
    return rows


def sizes_of(value: Any, *, most: int, dim: int) -> list[int]:
    """Return how many rows each of at most ``most`` parts gets; an empty list where there are none.

    Raises:
        ConfigError: Tensors have different numbers of rows.
    """
    rows = rows_of(value, dim)
    return [s.stop - s.start for s in split_evenly(rows, min(most, rows))] if rows else []


def scatter(value: Any, sizes: Sequence[int], dim: int) -> list[Any]:
    """Return one value for each size: tensors are split, all else is in every part.

    The pieces of tensors are views; those that have no such dimension are in every part too.
    """
    pieces: dict[int, Sequence[Tensor]] = {}

    def piece(leaf: Any, i: int) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() <= dim:
            return leaf
        if id(leaf) not in pieces:
            pieces[id(leaf)] = torch.split(leaf, list(sizes), dim)
        return pieces[id(leaf)][i]

    def part(i: int) -> Any:
        return tree_map(lambda leaf: piece(leaf, i), value)

    return [part(i) for i in range(len(sizes))]


def scatter_arguments(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, most: int, dim: int
) -> list[Arguments]:
    """Split whole arguments into those of at most ``most`` parts, of sizes that differ by at most one.

    Fewer rows than devices make fewer parts; arguments without tensors, or without rows, make one.

    Raises:
        ConfigError: Tensors have different numbers of rows.
    """
    sizes = sizes_of((args, kwargs), most=most, dim=dim)
    if not sizes:
        return [(args, kwargs)]
    scattered: list[Arguments] = scatter((args, kwargs), sizes, dim)
    return scattered


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
        if isinstance(arg, Tensor):
            msg = (
                f"with inputs_are_scattered=True {name} must be a tuple or list with one part per device, "
                f"got a tensor of shape {tuple(arg.shape)}"
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
