"""A quick check whether dictionaries still hold the same objects."""

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import is_
from typing import Any

__all__ = ["Contents", "same_objects"]


def same_objects(a: Sequence[Any], b: Sequence[Any]) -> bool:
    """Return whether both hold the same objects, by identity."""
    return len(a) == len(b) and all(map(is_, a, b))


class Contents:
    """What several dictionaries held when they were last read.

    The check goes through all of them in C: with the parameters, buffers and attributes of some hundreds of
    modules, on each call, a loop in Python would be the cost of the call.

    Args:
        rows: The dictionaries.
    """

    __slots__ = ("_names", "_rows", "_sizes", "_values")

    def __init__(self, rows: Iterable[dict[str, Any]]) -> None:
        self._rows = list(rows)
        self.read()

    def read(self) -> None:
        """Take what they hold now as the contents to compare with."""
        rows = self._rows
        self._sizes = list(map(len, rows))
        self._names = list(chain.from_iterable(rows))
        self._values = list(chain.from_iterable(map(dict.values, rows)))

    def is_same(self) -> bool:
        """Return whether they hold the same objects under the same names."""
        rows = self._rows
        return not rows or (
            list(map(len, rows)) == self._sizes
            and list(chain.from_iterable(rows)) == self._names
            and all(map(is_, self._values, chain.from_iterable(map(dict.values, rows))))
        )
