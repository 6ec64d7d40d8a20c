"""Values that a session has for each module, as long as the module lives."""

from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, Generic, TypeVar, cast
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

T = TypeVar("T")


class PerModule(Generic[T]):
    """A value for each module, as long as the module lives, also where the value refers to the module.

    A weak dictionary would keep the module alive then: it holds its values, and so their keys. Here the
    module holds the value: a cycle, which the garbage collector frees. What a session keeps for a model must
    not end earlier: ranks collect at different times, and to make it again may need a collective.

    A module that is its own value holds nothing: what one process prepares stays the user's own, in copies
    and pickles, too.
    """

    def __init__(self) -> None:
        self._modules: WeakSet[nn.Module] = WeakSet()

    def __setitem__(self, module: nn.Module, value: T) -> None:
        table = vars(module).get(_HELD)
        if value is not module:
            if not isinstance(table, _Held):  # in a pickled copy of a module it is a dict
                table = vars(module)[_HELD] = _Held()
            table.values[self] = value
        elif isinstance(table, _Held):
            table.values.pop(self, None)
        self._modules.add(module)

    def get(self, module: nn.Module) -> T | None:
        if module not in self._modules:  # the set, since a shallow copy of a module has its attributes
            return None
        table = vars(module).get(_HELD)
        itself = cast(T, module)
        return table.values.get(self, itself) if isinstance(table, _Held) else itself

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(list(self._modules))

    def clear(self) -> None:
        for module in self:
            if isinstance(table := vars(module).get(_HELD), _Held):
                table.values.pop(self, None)
        self._modules.clear()


_HELD = "_tp_held"


class _Held:
    """The values of one module; copies and pickles of the module have none."""

    def __init__(self) -> None:
        self.values: WeakKeyDictionary[PerModule[Any], Any] = WeakKeyDictionary()

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # Not this class: who loads the module may not have tp. And one that torch.load(weights_only=True)
        # takes, for files of whole modules.
        return OrderedDict, ()
