"""Functions over tuples of parts."""

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from tp_core import tree_leaves
from tp_core.internal import containers, join_cut
from tp_core.replicas import Replicas

from tp_tuple._transpose import arguments_of_parts, per_value

__all__ = ["cat", "tuple_fn"]

_CONTAINERS = containers()


def cat(returns: Sequence[Any], *, dim: int = 0) -> Any:
    """Concatenate the parts of each return value, where they are tensors.

    Written for ``TupleParallel(module, transfer_output=True, reduction=cat)``. Scalars are stacked
    to a vector; parts on several devices come to the first one's.

    Args:
        returns: A tuple with a tensor for each part (one return value), or a tuple of such tuples (several).
            The tensors of a value have the same shape but for ``dim``.
        dim: The dimension to concatenate along.

    Returns:
        For each value a tensor on the first part's device, whose size in ``dim`` is the sum of the parts';
        where the parts are dicts or dataclasses, one with such tensors; all else as it came.

    Raises:
        RuntimeError: The shapes of a value's parts differ in another dimension.

    Example:
        >>> cat((torch.zeros(2, 3), torch.zeros(1, 3))).shape
        torch.Size([3, 3])
        >>> [v.shape[0] for v in cat(((torch.zeros(2), torch.zeros(1)), (torch.ones(()),) * 2))]
        [3, 2]
    """
    if not isinstance(returns[0], tuple | list) or isinstance(returns[0], PackedSequence):
        return _cat(returns, dim)
    values = [_cat(value, dim) for value in returns]
    return type(returns)._make(values) if hasattr(returns, "_make") else tuple(values)


def _cat(parts: Sequence[Any], dim: int) -> Any:
    if not parts:
        return parts
    first = parts[0]
    container = _CONTAINERS[type(first)]
    if container is not None and not isinstance(first, tuple | list):
        labels = list(container.labels(first))
        if any(type(p) is not type(first) or list(container.labels(p)) != labels for p in parts):
            return parts
        columns = zip(*(container.children(p) for p in parts), strict=True)
        return container.rebuild(first, [_cat(column, dim) for column in columns])
    for kind in (Tensor, PackedSequence):
        if all(isinstance(p, kind) for p in parts):
            moved = [p.to(first.data.device) for p in parts]
            return torch.stack(moved) if kind is Tensor and first.dim() == 0 else join_cut(moved, dim)
    return parts


@overload
def tuple_fn(fn: Callable[..., Any], *, parallel: bool = ...) -> Callable[..., Any]: ...
@overload
def tuple_fn(
    fn: None = ..., *, parallel: bool = ...
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
def tuple_fn(fn: Callable[..., Any] | None = None, *, parallel: bool = False) -> Any:
    """Make a function take each argument as a tuple of parts, and return its values so.

    What `TupleParallel` does for ``forward``, for any function: where ``a, b = foo(x, y)``, it is
    ``(a1, a2), (b1, b2) = tuple_fn(foo)((x1, x2), (y1, y2))``.

    Args:
        fn: The function; without one, a decorator is returned.
        parallel: Run the parts at once, each in a persistent thread of its own, with the caller's
            grad mode and autocast.

    Raises:
        ConfigError: The arguments have different numbers of parts, or the results of values.

    Example:
        >>> tuple_fn(lambda x, y: (x + y, x * y))((1, 2), (3, 4))
        ((4, 6), (3, 8))
    """
    if fn is None:
        return lambda function: tuple_fn(function, parallel=parallel)
    function = fn
    replicas_on: dict[tuple[torch.device, ...], Replicas] = {}  # used for their threads alone

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        parts = arguments_of_parts(args, kwargs, most=None)
        if parallel and len(parts) > 1:
            devices = tuple(map(_device_of, parts))
            if devices not in replicas_on:
                replicas_on[devices] = Replicas(nn.Identity(), list(devices))
            results = replicas_on[devices].run(lambda _, p: function(*p[0], **p[1]), parts)
        else:
            results = [function(*a, **k) for a, k in parts]
        return per_value(results, tuple, mappings=False)

    return wrapper


def _device_of(part: Any) -> torch.device:
    return next((x.device for x in tree_leaves(part) if isinstance(x, Tensor)), torch.device("cpu"))
