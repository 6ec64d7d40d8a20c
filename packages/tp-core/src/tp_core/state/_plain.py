"""Nested values as JSON, and back as they were, with the tensors in them stored elsewhere by name."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any

from torch import Tensor

from tp_core._trees import containers, tree_leaves
from tp_core.errors import StateError

# -- Plain values as JSON, and back as they were: tuples, sets, counters, keys that are not strings
# JSON would make lists of tuples and text of numbers that are keys, and a scheduler that looks its steps
# up by number would find none. What JSON lacks becomes an object with one key that names its type.


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A reference to a stored tensor among plain values.

    Attributes:
        name: The name under which the tensor is stored.
        like_parameter: Whether it has the shape of its parameter, and is cut in the same way.
        is_on_accelerator: Whether the tensor of a user's own state was on an accelerator, whichever that was.
    """

    name: str
    like_parameter: bool
    is_on_accelerator: bool = False


_CONTAINERS = containers(stop=is_dataclass)  # references are leaves
_ATOMS = frozenset({type(None), bool, int, float, str})
_MARK = "$"
_FACTORIES: dict[str, type] = {
    kind.__name__: kind for kind in (bool, dict, float, int, list, set, str, tuple)
}
"""What makes the missing values of a defaultdict, of those that are read again; others come back as dicts."""
_DECODERS: dict[str, Callable[[Any], Any]] = {
    "$tuple": tuple,
    "$set": set,
    "$frozenset": frozenset,
    "$dict": dict,
    "$default": lambda found: defaultdict(_FACTORIES[found[0]], found[1]),
    "$tensor": lambda value: StoredTensor(*value),
    "$counter": lambda items: Counter(dict(items)),
}


def to_json(what: str, value: Any, *, indent: int | None = None) -> str:
    """Return plain values as JSON.

    Args:
        what: The words for the value in the message.
        value: Numbers, text, booleans, ``None``; lists, tuples, sets, and dicts of several kinds of them.
        indent: For people, where values are few: that takes ten times as long.

    Raises:
        StateError: ``value`` has something else in it.
    """
    try:
        return json.dumps(_encoded(value), indent=indent)
    except (TypeError, ValueError) as error:
        msg = f"{what} holds what a checkpoint does not, plain values only: {error}"
        raise StateError(msg) from error


def from_json(text: str) -> Any:
    """Return what :func:`to_json` was given.

    Raises:
        ValueError: ``text`` is not JSON.
    """
    return json.loads(text, object_hook=_decoded)


def _encoded(value: Any) -> Any:
    if type(value) in _ATOMS:
        return value
    if isinstance(value, list):
        if all(type(v) in _ATOMS for v in value):
            return value
        return [_encoded(v) for v in value]
    if isinstance(value, tuple):
        return {"$tuple": [_encoded(v) for v in value]}
    if isinstance(value, dict):
        if isinstance(value, Counter):
            return {"$counter": _pairs(value.items())}
        if isinstance(value, defaultdict):
            factory = next((n for n, kind in _FACTORIES.items() if kind is value.default_factory), None)
            if factory is not None:
                return {"$default": [factory, _pairs(value.items())]}
        if all(type(key) is str and not key.startswith(_MARK) for key in value):
            return {key: _encoded(v) for key, v in value.items()}
        return {"$dict": _pairs(value.items())}
    if isinstance(value, StoredTensor):
        return {"$tensor": [value.name, value.like_parameter, value.is_on_accelerator]}
    if isinstance(value, set | frozenset):
        key = "$set" if isinstance(value, set) else "$frozenset"
        return {key: [_encoded(v) for v in value]}
    return value  # a number of another type; or for json to refuse


def _pairs(items: Iterable[tuple[Any, Any]]) -> list[list[Any]]:
    return [[_encoded(key), _encoded(value)] for key, value in items]


def _decoded(encoded: dict[str, Any]) -> Any:
    if len(encoded) == 1:
        ((kind, values),) = encoded.items()
        if kind in _DECODERS:
            return _DECODERS[kind](values)
    return encoded


# -- Nested values as plain ones, with the tensors in them stored elsewhere by name ---------------


Put = Callable[[str, Tensor, Tensor | None], StoredTensor]
"""Stores a tensor under a name, as belonging to a parameter or to none, and returns what stands for it."""
Get = Callable[[StoredTensor, Tensor | None], Tensor]
"""Returns the tensor that was stored, cut as its parameter is."""


def split(value: Any, name: str, parameter: Tensor | None, put: Put) -> Any:
    """Return a nested value with what stands for its tensors, which ``put`` gets."""
    if isinstance(value, Tensor):
        return put(name, value, parameter)
    if isinstance(value, list | tuple):
        items = [split(v, f"{name}.{i}", parameter, put) for i, v in enumerate(value)]
        if isinstance(value, list):
            return items
        return tuple(items)
    if isinstance(value, dict):
        return _like(value, {k: split(v, f"{name}.{k}", parameter, put) for k, v in value.items()})
    return value


def joined(value: Any, parameter: Tensor | None, get: Get) -> Any:
    if isinstance(value, StoredTensor):
        return get(value, parameter)
    if isinstance(value, list | tuple):
        items = [joined(v, parameter, get) for v in value]
        if isinstance(value, list):
            return items
        return tuple(items)
    if isinstance(value, dict):
        return _like(value, {k: joined(v, parameter, get) for k, v in value.items()})
    return value


def _like(value: dict[Any, Any], entries: dict[Any, Any]) -> dict[Any, Any]:
    """Return a dict of the kind of ``value`` with other entries."""
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, entries)
    if isinstance(value, Counter):
        return Counter(entries)
    return entries


def tensors_in(value: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(value, table=_CONTAINERS) if isinstance(leaf, Tensor))


def refs_in(value: Any) -> Iterator[StoredTensor]:
    """Yield what stands for tensors in a nested value."""
    return (leaf for leaf in tree_leaves(value, table=_CONTAINERS) if isinstance(leaf, StoredTensor))
