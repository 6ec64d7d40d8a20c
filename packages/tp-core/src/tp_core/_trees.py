"""Nested values: what a container is, and the walk over the leaves."""

import copy
import dataclasses
import inspect
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from functools import cached_property
from operator import attrgetter
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch.nn.utils.rnn import PackedSequence

from tp_core.errors import CycleError, TransferError

# -- Types of containers --------------------------------------------------------------------------


T = TypeVar("T")

_MAX_TYPES = 4096
"""The limit of cached types: a program that makes types on the fly must not fill the memory with them."""


class PerType(dict[type, T], Generic[T]):
    """A table of values that are computed once for each type: ``table[type(value)]`` is then one look-up.

    Example:
        >>> names = PerType(lambda cls: cls.__name__)
        >>> names[int]
        'int'
    """

    def __init__(self, decide: Callable[[type], T]) -> None:
        super().__init__()
        self._decide = decide

    def __missing__(self, cls: type) -> T:
        if len(self) >= _MAX_TYPES:
            self.clear()
        decision = self[cls] = self._decide(cls)
        return decision


class Container(NamedTuple):
    """The functions of one container type.

    Attributes:
        children: Returns its values.
        labels: Returns the expression of each child after the container's name: ``[0]``, ``.mask``.
        rebuild: Returns a new container like the given one, with other children.
    """

    children: Callable[[Any], Collection[Any]]
    labels: Callable[[Any], Iterable[str]]
    rebuild: Callable[[Any, list[Any]], Any]


def containers(*, stop: Callable[[type], bool] = lambda _: False) -> PerType[Container | None]:
    """Return a table with the `Container` of each type, or ``None`` for the type of a leaf.

    It is for other walks than `tree_map` and `tree_leaves`, for example over several trees at once.

    Args:
        stop: Called once per type; where it returns true, the type is a leaf whatever it inherits.

    Example:
        >>> table = containers()
        >>> table[dict].rebuild({"a": 1, "b": 2}, [3, 4]), table[int]
        ({'a': 3, 'b': 4}, None)
    """
    return PerType(lambda cls: None if stop(cls) else _container_of(cls))


def _container_of(cls: type) -> Container | None:
    if cls in _EXACT:
        return _EXACT[cls]
    if issubclass(cls, Mapping):
        return _mapping_of(cls)
    if issubclass(cls, list):
        return _LIST
    if issubclass(cls, tuple):
        if hasattr(cls, "n_sequence_fields"):
            return _STRUCTSEQ
        return _TUPLE
    if dataclasses.is_dataclass(cls):
        return _dataclass_of(cls)
    return None


# -- lists and tuples -----------------------------------------------------------------------------


def _same(value: Collection[Any]) -> Collection[Any]:
    return value


def _positions(value: Collection[Any]) -> Iterable[str]:
    names = getattr(value, "_fields", None)  # of a namedtuple
    if names:
        return [f".{n}" for n in names]
    return [f"[{i}]" for i in range(len(value))]


def _rebuild_list(old: list[Any], values: list[Any]) -> Any:
    new = copy.copy(old)
    new[:] = values
    return new


def _rebuild_tuple(old: tuple[Any, ...], values: list[Any]) -> Any:
    # Not type(old)(...): the constructor of a namedtuple, or of a subclass, may take other arguments.
    new = tuple.__new__(type(old), values)
    if hasattr(old, "__dict__"):
        new.__dict__.update(old.__dict__)
    return new


def _rebuild_structseq(old: Any, values: list[Any]) -> Any:
    # __reduce__ is the only way to the fields with a name and no position (os.stat_result has some).
    cls, (_, hidden) = old.__reduce__()
    return cls(values, hidden)


# -- mappings -------------------------------------------------------------------------------------


def _values(mapping: Mapping[Any, Any]) -> Collection[Any]:
    return list(mapping.values())  # some mappings make their values again at each request


def _keys(mapping: Mapping[Any, Any]) -> Iterable[str]:
    return [f"[{key!r}]" for key in mapping]


def _rebuild_dict(old: dict[Any, Any], values: list[Any]) -> Any:
    return dict(zip(old, values, strict=True))


def _rebuild_copy(old: Any, values: list[Any]) -> Any:
    """Copy, then assign: keeps default factories, attributes, and what ``__setitem__`` does."""
    new = copy.copy(old)
    if getattr(old, "__dict__", None) is old:  # class AttrDict(dict): self.__dict__ = self
        new.__dict__ = new
    for key, value in zip(old, values, strict=True):
        new[key] = value
    return new


def _rebuild_mapping(old: Any, values: list[Any]) -> Any:
    """Call the type with a dict: a plain copy may share its storage with the original."""
    cls = type(old)
    try:
        return cls(dict(zip(old, values, strict=True)))
    except TypeError as error:
        msg = (
            f"cannot make a new {cls.__qualname__}: {cls.__qualname__}(dict) raised {error}; "
            "let its constructor take a mapping, or give the class a .to(device) method that "
            "returns the moved object"
        )
        raise TransferError(msg) from error


def _mapping_of(cls: type) -> Container:
    copies_itself = issubclass(cls, dict | UserDict) or (
        issubclass(cls, MutableMapping) and hasattr(cls, "__copy__")
    )
    rebuild = _rebuild_copy if copies_itself else _rebuild_mapping
    return Container(_values, _keys, rebuild)


# -- dataclasses ----------------------------------------------------------------------------------


def _dataclass_of(cls: type) -> Container:
    names = tuple(f.name for f in dataclasses.fields(cls))
    # One call for all fields: this runs for every batch. With one name attrgetter returns no tuple.
    get = attrgetter(*names) if len(names) > 1 else None
    cached = frozenset(
        name
        for base in cls.__mro__
        for name, value in vars(base).items()
        if isinstance(value, cached_property)
    )

    def present(value: Any) -> list[str]:
        return [n for n in names if hasattr(value, n)]  # init=False fields may not be set yet

    init_names = frozenset(f.name for f in dataclasses.fields(cls) if f.init)
    derives = hasattr(cls, "__post_init__") and cls.__dataclass_params__.init  # type: ignore[attr-defined]
    # InitVars: nobody has their values any more.
    required = _required(cls) if derives else ()
    lacking = frozenset(required) - init_names

    def rederived(old: Any, values: dict[str, Any]) -> Any:
        """Return the result of ``dataclasses.replace``: ``__post_init__`` derives from the new values."""
        stale = [n for n, v in values.items() if n not in init_names and v is getattr(old, n)]
        if lacking and stale:
            msg = (
                f"cannot derive {', '.join(map(repr, stale))} of another {cls.__qualname__}: __post_init__ "
                f"takes {', '.join(map(repr, sorted(lacking)))}, which is not kept; keep it in a "
                "field, or make the derived one a property"
            )
            raise TransferError(msg)
        new = copy.copy(old)
        if not lacking:
            new = dataclasses.replace(old, **{n: v for n, v in values.items() if n in init_names})
            for name, value in getattr(old, "__dict__", {}).items():
                new.__dict__.setdefault(name, value)  # what was set on it later
        for name, value in values.items():
            # Given values have been through __post_init__ once; of derived ones those that moved, or were
            # split, are right, and numbers and the like are those that belong to the new values.
            if name not in stale or not hasattr(new, name):
                object.__setattr__(new, name, value)
        return new

    def rebuild(old: Any, values: list[Any]) -> Any:
        named = dict(zip(present(old), values, strict=True))
        if derives:
            new = rederived(old, named)
        else:
            new = copy.copy(old)
            for name, value in named.items():
                object.__setattr__(new, name, value)  # frozen ones refuse plain assignment
        if cached:
            for name in cached & vars(new).keys():
                del new.__dict__[name]  # it was computed from the old values
        return new

    def children(value: Any) -> Collection[Any]:
        if get is not None:
            try:
                return get(value)
            except AttributeError:  # a field that is not set
                pass
        return [getattr(value, n) for n in present(value)]

    return Container(children, lambda value: [f".{n}" for n in present(value)], rebuild)


def _required(cls: type) -> list[str]:
    parameters = inspect.signature(cls).parameters.values()
    return [p.name for p in parameters if p.default is p.empty and p.kind is not p.VAR_KEYWORD]


_LIST = Container(_same, _positions, _rebuild_list)
_TUPLE = Container(_same, _positions, _rebuild_tuple)
_STRUCTSEQ = Container(_same, _positions, _rebuild_structseq)
_EXACT: Mapping[type, Container | None] = MappingProxyType(
    {
        dict: Container(dict.values, _keys, _rebuild_dict),
        list: Container(_same, _positions, lambda _, values: values),
        tuple: Container(_same, _positions, lambda _, values: tuple(values)),
        # Tuples by inheritance, values by use.
        torch.Size: None,
        PackedSequence: None,
    }
)


# -- Functions over leaves ------------------------------------------------------------------------


_CONTAINERS = containers()
_OPEN = object()  # the result of a container while its children are visited: to meet it means a cycle


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
    itself where there is nothing to do. ``leaf`` should return the same result for the same object:
    it is called once for a changed leaf, and at each place for an unchanged one.

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

    It is an object and no recursive inner function: that would be a reference cycle, and would keep a
    batch's tensors until the garbage collector runs.
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
    if container is None:
        return iter((obj,))
    return _leaves(obj, container, obj, set(), table)


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
    """Return an error with the path of the cycle, by a second walk: to record paths on each is too slow."""
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
        if nested := _search(child, path + label, done, open_at, table):
            return nested
    del open_at[key]
    done.add(key)
    return None
