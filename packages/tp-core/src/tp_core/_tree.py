"""Apply a function to the leaves of nested containers."""

from collections.abc import Callable, Iterator
from typing import Any

from tp_core._containers import Container, PerType, containers
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
    instances, and subclasses of these; all else is a leaf, sets too. Types are kept, and so are
    attributes that a subclass has beside its items. Keys are not visited.

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
    changed: dict[int, Any] = {}  # id of a leaf -> its result
    done: dict[int, Any] = {}  # id of a container -> its result
    alive: list[Any] = []  # while an id is a key above, its object must not die

    def visit(value: Any, container: Container) -> Any:
        key = id(value)
        if key in done:
            if done[key] is _OPEN:
                raise _cycle_error(obj, table)
            return done[key]
        done[key] = _OPEN
        results: list[Any] = []
        is_same = True
        for child in container.children(value):  # one frame for all leaves: calls are the cost
            inner = table[type(child)]
            if inner is not None:
                result = visit(child, inner)
            elif changed and id(child) in changed:
                result = changed[id(child)]
            else:
                result = leaf(child)
                if result is not child:
                    changed[id(child)] = result
                    alive.append(child)
            if result is not child:
                is_same = False
            results.append(result)
        if is_same:
            done[key] = value
        else:
            done[key] = container.rebuild(value, results)
            alive.append(value)
        return done[key]

    return visit(obj, root)


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
    path: set[int] = set()

    def walk(value: Any) -> Iterator[Any]:
        container = table[type(value)]
        if container is None:
            yield value
            return
        key = id(value)
        if key in path:
            raise _cycle_error(obj, table)
        path.add(key)
        for child in container.children(value):
            yield from walk(child)
        path.remove(key)

    return walk(obj)


def _cycle_error(obj: Any, table: PerType[Container | None]) -> CycleError:
    """Walk once more to tell where the cycle is: paths are too dear to keep on every walk."""
    done: set[int] = set()
    open_at: dict[int, str] = {}

    def search(value: Any, path: str) -> tuple[str, str, type] | None:
        container = table[type(value)]
        key = id(value)
        if container is None or key in done:
            return None
        if key in open_at:
            return open_at[key], path, type(value)
        open_at[key] = path
        for label, child in zip(container.labels(value), container.children(value), strict=True):
            if found := search(child, path + label):
                return found
        del open_at[key]
        done.add(key)
        return None

    outer, inner, cls = search(obj, "obj") or ("obj", "obj", type(obj))
    msg = (
        f"{outer} (a {cls.__qualname__}) contains itself, as {inner}; break the cycle, or keep "
        "that reference in something that is not a container"
    )
    return CycleError(msg)
