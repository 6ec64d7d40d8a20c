"""Functions over tuples of parts: from one value per part to parts per value, and back."""

from collections.abc import Callable, Iterator, Mapping, Sequence, Sized
from functools import wraps
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence
from tp_core import containers, device_of
from tp_core.arguments import explain_arguments
from tp_core.data import cat_rows
from tp_core.errors import ConfigError, TransferError
from tp_core.replicas import Replicas

_CONTAINERS = containers()


def cat(returns: Sequence[Any], *, dim: int = 0) -> Any:
    """Concatenate the parts of each return value, where they are tensors.

    Written for ``TupleParallel(module, transfer_output=True, reduction=cat)``. Scalars are stacked
    to a vector; parts on other devices are copied to the first part's device.

    Collectives: forward gathers the parts on the first part's device; backward copies each part's
    gradient to its device.

    Args:
        returns: A tuple with a tensor for each part (one return value), or a tuple of such tuples (several).
            The tensors of a value have the same shape but for ``dim``.
        dim: The dimension to concatenate along.

    Returns:
        For each value a tensor on the first part's device; its size in ``dim`` is the sum of the parts'
        sizes. For dicts or dataclasses, one with such tensors. All else is unchanged.

    Raises:
        ConfigError: ``returns`` is not a tuple or list with a part.
        RuntimeError: The shapes of a value's parts differ in another dimension.

    Example:
        >>> cat((torch.zeros(2, 3), torch.zeros(1, 3))).shape
        torch.Size([3, 3])
        >>> [v.shape[0] for v in cat(((torch.zeros(2), torch.zeros(1)), (torch.ones(()),) * 2))]
        [3, 2]
    """
    if not isinstance(returns, tuple | list) or not returns:
        kind = type(returns).__name__
        msg = (
            "cat() takes a tuple or list with the tensor of each part, or one such tuple for each value, got "
            f"{kind}: {returns!r:.80}; write cat((part, part)), or TupleParallel(module, reduction=cat)"
        )
        raise ConfigError(msg)
    if not isinstance(returns[0], tuple | list) or isinstance(returns[0], PackedSequence):
        return _cat(returns, dim)
    if _are_lists_of_dicts(returns):  # a part has one for each sample
        return [each for part in returns for each in part]
    values = [_cat(value, dim) for value in returns]
    if hasattr(returns, "_make"):  # a named tuple
        return type(returns)._make(values)
    return tuple(values)


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
            if kind is Tensor and first.dim() == 0:
                return torch.stack(moved)
            return cat_rows(moved, dim)
    return parts


@overload
def tuple_fn(fn: Callable[..., Any], *, parallel: bool = ...) -> Callable[..., Any]: ...
@overload
def tuple_fn(
    fn: None = ..., *, parallel: bool = ...
) -> Callable[[Callable[..., Any]], Callable[..., Any]]: ...
@explain_arguments("tuple_fn(function)")
def tuple_fn(fn: Callable[..., Any] | None = None, *, parallel: bool = False) -> Any:
    """Make a function take each argument as a tuple of parts, and return its values so.

    `TupleParallel` does the same for ``forward``. Where ``a, b = foo(x, y)``, it is
    ``(a1, a2), (b1, b2) = tuple_fn(foo)((x1, x2), (y1, y2))``.

    Args:
        fn: The function; without one, a decorator is returned.
        parallel: Run the parts at once, each in a persistent thread of its own, with the caller's
            grad mode and autocast.

    Raises:
        ConfigError: ``fn`` is not a function; the arguments have different numbers of parts, or the results
            of values.

    Example:
        >>> tuple_fn(lambda x, y: (x + y, x * y))((1, 2), (3, 4))
        ((4, 6), (3, 8))
    """
    if fn is None:
        return lambda function: tuple_fn(function, parallel=parallel)
    if not callable(fn):
        msg = f"tuple_fn() takes a function of one part, got {type(fn).__name__}: {fn!r:.80}"
        raise ConfigError(msg)
    function = fn
    replicas_on: dict[tuple[torch.device, ...], Replicas] = {}  # used for their threads alone

    @wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        parts = arguments_of_parts(args, kwargs, most=None)
        if parallel and len(parts) > 1:
            devices = tuple(map(device_of, parts))
            if devices not in replicas_on:
                replicas_on[devices] = Replicas(nn.Identity(), list(devices))
            results = replicas_on[devices].run(lambda _, p: function(*p[0], **p[1]), parts)
        else:
            results = [function(*a, **k) for a, k in parts]
        return per_value(results, tuple, mappings=False)

    return wrapper


class Tuplewise:
    """Sequence that applies attribute look-ups and indexing to each of its items.

    Args:
        items: A list or tuple.

    Raises:
        ConfigError: ``items`` is not a list or tuple.

    Example:
        >>> Tuplewise([(0, 1), (2, 3), (4, 5)])[0]
        [0, 2, 4]
        >>> Tuplewise([1 + 2j, 3j]).imag
        [2.0, 3.0]
    """

    __slots__ = ("_tuplewise_items",)

    def __init__(self, items: Sequence[Any]) -> None:
        if not isinstance(items, tuple | list):
            msg = f"Tuplewise takes a list or tuple, got {type(items).__name__}: {items!r:.80}"
            raise ConfigError(msg)
        self._tuplewise_items = items

    def __getattribute__(self, name: str) -> Any:
        # Python itself asks for names like __class__; those stay this object's own.
        if name == "_tuplewise_items" or (name.startswith("__") and name.endswith("__")):
            return object.__getattribute__(self, name)
        return _of_each(self._tuplewise_items, lambda item: getattr(item, name), f"attribute {name!r}")

    def __getitem__(self, key: Any) -> list[Any]:
        return _of_each(self._tuplewise_items, lambda item: item[key], f"[{key!r}]")

    def __len__(self) -> int:
        return len(self._tuplewise_items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tuplewise_items)

    def __repr__(self) -> str:
        return f"Tuplewise({self._tuplewise_items!r})"


def _of_each(items: Sequence[Any], look_up: Callable[[Any], Any], what: str) -> list[Any]:
    """Return what a look-up finds in each item; a note on an error says which item has nothing there."""
    found: list[Any] = []
    for item in items:
        try:
            found.append(look_up(item))
        except (AttributeError, LookupError, TypeError) as error:
            size = ""
            if isinstance(item, Sized):
                size = f" of {len(item)}"
            error.add_note(
                f"tuplewise() asks each of its {len(items)} items for {what}, and number {len(found)}, a "
                f"{type(item).__name__}{size}, has none; give items that all have it"
            )
            raise
    return found


def tuplewise(items: Sequence[Any]) -> Tuplewise:
    """Return ``Tuplewise(items)``.

    Raises:
        ConfigError: ``items`` is not a list or tuple.
    """
    return Tuplewise(items)


def per_value(results: Sequence[Any], make: Callable[[list[Any]], Any], *, mappings: bool) -> Any:
    """Turn the parts' results into one value with an entry per part.

    Tuples, lists and named tuples of k values become k values, each with an entry per part; so do
    mappings, if ``mappings``. Anything else becomes one value, and so does a list of dicts, which
    detection models return, one for each image.
    """
    first = results[0]
    if not mappings and _are_lists_of_dicts(results):
        return make(list(results))
    if isinstance(first, PackedSequence):  # a tuple by inheritance, a value by use
        return make(list(results))
    if isinstance(first, tuple | list):
        lengths = [len(r) if isinstance(r, tuple | list) else None for r in results]
        if any(n != len(first) for n in lengths):
            msg = (
                f"all parts must have the same number of values, got {lengths} (None: no tuple or "
                "list at all); return the same shape of result from every part"
            )
            raise ConfigError(msg)
        values = [make(list(column)) for column in zip(*results, strict=True)]
        if hasattr(first, "_make"):
            return type(first)._make(values)
        return tuple(values)
    if mappings and isinstance(first, Mapping):
        for i, result in enumerate(results):
            if not isinstance(result, Mapping) or result.keys() != first.keys():
                keys = sorted(map(str, result)) if isinstance(result, Mapping) else type(result).__name__
                msg = (
                    f"all parts must have the same keys, got {sorted(map(str, first))} and in part {i} {keys}"
                )
                raise ConfigError(msg)
        values = [make([r[key] for r in results]) for key in first]
        container = _CONTAINERS[type(first)]
        assert container is not None, "each mapping is a container"  # noqa: S101
        try:
            return container.rebuild(first, values)
        except TransferError:  # the type cannot be made from a dict; torch's default_collate makes one, too
            return dict(zip(first, values, strict=True))
    return make(list(results))


def _are_lists_of_dicts(results: Sequence[Any]) -> bool:
    if any(type(result) is not list for result in results):
        return False
    entries = [entry for result in results for entry in result]
    return bool(entries) and all(isinstance(entry, Mapping) for entry in entries)


def arguments_of_parts(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, most: int | None
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Turn arguments that are tuples of parts into the arguments of each part."""
    if not args and not kwargs:
        msg = "expected at least one argument, a tuple or list with one entry per part"
        raise ConfigError(msg)
    count = -1
    for i, arg in enumerate(args):
        count = _count(i, arg, count, most)
    for name, arg in kwargs.items():
        count = _count(name, arg, count, most)
    if not kwargs:
        if count == 1:  # one device must cost next to nothing
            return [(tuple([a[0] for a in args]), {})]
        return [(a, {}) for a in zip(*args, strict=True)]
    return [(tuple([a[i] for a in args]), {name: a[i] for name, a in kwargs.items()}) for i in range(count)]


def _count(name: int | str, arg: Any, count: int, most: int | None) -> int:
    if not isinstance(arg, tuple | list) or isinstance(arg, PackedSequence):
        shape = getattr(arg, "shape", None)
        if shape is None:
            shape_text = f": {arg!r:.80}"
        else:
            shape_text = f" of shape {tuple(shape)}"
        msg = (
            f"argument {name!r} must be a tuple or list with one part per device, "
            f"got {type(arg).__name__}{shape_text}; tp_tuple.tp_collate makes a loader's batches so"
        )
        raise ConfigError(msg)
    parts = len(arg)
    if count >= 0 and parts != count:
        msg = f"argument {name!r} must have {count} parts like the arguments before it, got {parts}"
        raise ConfigError(msg)
    if parts == 0 or (most is not None and parts > most):
        expected = "at least 1" if most is None else f"1 to {most}"
        msg = f"argument {name!r} must have {expected} parts, one per device, got {parts}"
        raise ConfigError(msg)
    return parts
