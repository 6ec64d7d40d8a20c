"""Apply a function to the leaves of nested containers."""

from collections.abc import Callable, Iterator
from typing import Any

from tp_core._devices._containers import Container, PerType, containers
from tp_core.errors import CycleError

__all__ = ["tree_leaves", "tree_map"]

_CONTAINERS = containers()
_OPEN = object()  # stands for the result of a container whose children are being visited


def tree_map(
    leaf: Callable[[Any], Any],
    obj: Any,
    *,
    table: PerType[Container | None] = _CONTAINERS,
) -> Any:
    """Return ``obj`` with ``leaf(value)`` in place of each value that is not a container.

    Containers are mappings, lists, tuples, named tuples, torch's result tuples, dataclass
    instances, and subclasses of these; all else is a leaf, packed sequences and sets too. Types are
    kept, and so are attributes that a subclass has besides its items. Keys are not visited.

    An object that occurs twice in ``obj`` occurs once in the result. A container in which no leaf
    became another object is returned itself and not copied, as ``Tensor.to`` returns the tensor
    itself where there is nothing to do. ``leaf`` should give the same answer for the same object:
    a changed leaf is asked for once, an unchanged one at each place.

    Args:
        leaf: The function of one leaf.
        obj: Anything.
        table: Which types are containers; another one comes from `containers`.

    Raises:
        CycleError: A container contains itself.
        TransferError: A mapping of a type that cannot be made from a dict.

    Example:
        >>> tree_map(lambda x: x + 1, {"a": [1, 2], "b": (3,)})
        {'a': [2, 3], 'b': (4,)}
    """
    root = table[type(obj)]
    if root is None:
        return leaf(obj)
    return _Walk(leaf, obj, table).visit(obj, root)


class _Walk:
    """One walk of `tree_map`.

    An object, and no function in a function that calls itself: that would be a reference cycle, and
    what it saw of a batch would live until the garbage collector comes by.
    """

    __slots__ = ("_alive", "_changed", "_done", "_leaf", "_obj", "_table")

    def __init__(self, leaf: Callable[[Any], Any], obj: Any, table: PerType[Container | None]) -> None:
        self._leaf = leaf
        self._obj = obj
        self._table = table
        self._changed: dict[int, Any] = {}  # id of a leaf -> its result
        self._done: dict[int, Any] = {}  # id of a container -> its result
        self._alive: list[Any] = []  # while an id is a key above, its object must not die

    def visit(self, value: Any, container: Container) -> Any:
        """Return what the container becomes."""
        table, leaf, changed, done = self._table, self._leaf, self._changed, self._done
        key = id(value)
        if key in done:
            if done[key] is _OPEN:
                raise _cycle_error(self._obj, table)
            return done[key]
        done[key] = _OPEN
        results: list[Any] = []
        is_same = True
        for child in container.children(value):  # one frame for all leaves: calls are the cost
            inner = table[type(child)]
            if inner is not None:
                result = self.visit(child, inner)
            elif changed and id(child) in changed:
                result = changed[id(child)]
            else:
                result = leaf(child)
                if result is not child:
                    changed[id(child)] = result
                    self._alive.append(child)
            if result is not child:
                is_same = False
            results.append(result)
        if is_same:
            done[key] = value
        else:
            done[key] = container.rebuild(value, results)
            self._alive.append(value)
        return done[key]


def tree_leaves(obj: Any, *, table: PerType[Container | None] = _CONTAINERS) -> Iterator[Any]:
    """Yield the values of ``obj`` that are not containers, in order, at each place they occur.

    Args:
        obj: Anything.
        table: Which types are containers; another one comes from `containers`.

    Raises:
        CycleError: A container contains itself.

    Example:
        >>> list(tree_leaves({"a": [1, 2], "b": (3,)}))
        [1, 2, 3]
    """
    container = table[type(obj)]
    return iter((obj,)) if container is None else _leaves(obj, container, obj, set(), table)


def _leaves(
    value: Any, container: Container, root: Any, path: set[int], table: PerType[Container | None]
) -> Iterator[Any]:
    key = id(value)
    if key in path:
        raise _cycle_error(root, table)
    path.add(key)
    for child in container.children(value):  # one frame for all leaves: calls are the cost
        inner = table[type(child)]
        if inner is None:
            yield child
        else:
            yield from _leaves(child, inner, root, path, table)
    path.remove(key)


def _cycle_error(obj: Any, table: PerType[Container | None]) -> CycleError:
    """Walk once more to tell where the cycle is: paths are too dear to keep on every walk."""
    outer, inner, cls = _search(obj, "obj", set(), {}, table) or ("obj", "obj", type(obj))
    msg = (
        f"{outer} (a {cls.__qualname__}) contains itself, as {inner}; break the cycle, or keep "
        "that reference in something that is not a container"
    )
    return CycleError(msg)


def _search(
    value: Any, path: str, done: set[int], open_at: dict[int, str], table: PerType[Container | None]
) -> tuple[str, str, type] | None:
    container = table[type(value)]
    key = id(value)
    if container is None or key in done:
        return None
    if key in open_at:
        return open_at[key], path, type(value)
    open_at[key] = path
    for label, child in zip(container.labels(value), container.children(value), strict=True):
        if found := _search(child, path + label, done, open_at, table):
            return found
    del open_at[key]
    done.add(key)
    return None
