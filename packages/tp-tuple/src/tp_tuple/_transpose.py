"""From one value per part to parts per value, and back; strict about lengths."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch.nn.utils.rnn import PackedSequence
from tp_core.errors import ConfigError, TransferError
from tp_core.internal import containers

__all__ = ["arguments_of_parts", "per_value"]

_CONTAINERS = containers()


def per_value(results: Sequence[Any], make: Callable[[list[Any]], Any], *, mappings: bool) -> Any:
    """Turn the parts' results into one value with an entry per part.

    Tuples, lists and named tuples of k values become k values, each with an entry per part; so do
    mappings, if ``mappings``; anything else becomes one value.

    Args:
        results: One result per part.
        make: Makes a value from its entries.
        mappings: Whether to look into mappings.

    Raises:
        ConfigError: The parts have different numbers of values, or different keys.
    """
    first = results[0]
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
        return type(first)._make(values) if hasattr(first, "_make") else tuple(values)
    if mappings and isinstance(first, Mapping):
        for i, result in enumerate(results):
            if not isinstance(result, Mapping) or result.keys() != first.keys():
                keys = sorted(map(str, result)) if isinstance(result, Mapping) else type(result).__name__
                msg = (
                    f"all parts must have the same keys, got {sorted(map(str, first))} and in part {i} {keys}"
                )
                raise ConfigError(msg)
        return _like(first, [make([r[key] for r in results]) for key in first])
    return make(list(results))


def _like(mapping: Mapping[Any, Any], values: list[Any]) -> Any:
    """Return a mapping of the same type and keys, or a dict where the type cannot be made from one."""
    container = _CONTAINERS[type(mapping)]
    if container is not None:
        try:
            return container.rebuild(mapping, values)
        except TransferError:  # torch's default_collate falls back to a dict too
            pass
    return dict(zip(mapping, values, strict=True))


def arguments_of_parts(
    args: tuple[Any, ...], kwargs: dict[str, Any], *, most: int | None
) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Turn arguments that are tuples of parts into the arguments of each part.

    Args:
        args: Positional arguments.
        kwargs: Keyword arguments.
        most: The most parts there may be; ``None`` for any number.

    Raises:
        ConfigError: An argument is not a tuple or list, or has another number of parts; or there are none.
    """
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
    """Return the number of parts of the argument with that place or name."""
    if not isinstance(arg, tuple | list) or isinstance(arg, PackedSequence):
        shape = getattr(arg, "shape", None)
        what = f": {arg!r:.80}" if shape is None else f" of shape {tuple(shape)}"
        msg = (
            f"argument {name!r} must be a tuple or list with one part per device, "
            f"got {type(arg).__name__}{what}; tp_tuple.tp_collate makes a loader's batches so"
        )
        raise ConfigError(msg)
    given = len(arg)
    if count >= 0 and given != count:
        msg = f"argument {name!r} must have {count} parts like the arguments before it, got {given}"
        raise ConfigError(msg)
    if given == 0 or (most is not None and given > most):
        expected = "at least 1" if most is None else f"1 to {most}"
        msg = f"argument {name!r} must have {expected} parts, one per device, got {given}"
        raise ConfigError(msg)
    return given
