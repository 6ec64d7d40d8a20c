"""Values nested in plain lists, tuples and dicts: those in checkpoints, and arguments of operators."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

__all__ = ["leaves_in", "mapped"]


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    """Return a nested value with ``function`` of each leaf."""
    if isinstance(value, list | tuple):
        return type(value)(mapped(function, item) for item in value)
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    return function(value)


def leaves_in(value: Any) -> Iterator[Any]:
    """Yield the leaves of a nested value, in its order."""
    if isinstance(value, Mapping):
        value = list(value.values())
    if isinstance(value, list | tuple):
        for item in value:
            yield from leaves_in(item)
    else:
        yield value
