"""List comprehensions over parts, written as if there were one part."""

from collections.abc import Iterator, Sequence
from typing import Any

from tp_core.errors import ConfigError

__all__ = ["Tuplewise", "tuplewise"]


class Tuplewise:
    """Applies attribute look-ups and indexing to each of several items.

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
        return [getattr(item, name) for item in self._tuplewise_items]

    def __getitem__(self, key: Any) -> list[Any]:
        return [item[key] for item in self._tuplewise_items]

    def __len__(self) -> int:
        return len(self._tuplewise_items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._tuplewise_items)

    def __repr__(self) -> str:
        return f"Tuplewise({self._tuplewise_items!r})"


def tuplewise(items: Sequence[Any]) -> Tuplewise:
    """Return ``Tuplewise(items)``: another way to write it.

    Raises:
        ConfigError: ``items`` is not a list or tuple.
    """
    return Tuplewise(items)
