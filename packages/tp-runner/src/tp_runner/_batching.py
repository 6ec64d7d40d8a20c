"""Batches of items for a worker's function, and the results of each item in its answer."""

import functools
import inspect
import pickle
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from tp_core.errors import ConfigError

NOT_AWAITED = (
    "{name} is async: workers call it, and nobody awaits what it returns; give a function that runs it, such "
    "as lambda item: asyncio.run({name}(item)), or with batch= one that gathers many at a time"
)


def refuse_async(function: Any) -> None:
    """Refuse ``async def`` work by its name, on every engine.

    Raises:
        ConfigError: The function, or what a callable object calls, is asynchronous.
    """
    while isinstance(function, functools.partial):
        function = function.func
    code = getattr(function, "__code__", None) or getattr(type(function).__call__, "__code__", None)
    if code is not None and code.co_flags & (inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR):
        raise ConfigError(NOT_AWAITED.format(name=code.co_qualname))


@dataclass(frozen=True, slots=True)
class Batching:
    """The size of a batch, and how its items are joined.

    Attributes:
        size: The most items of one batch; the last one may have fewer.
        collate: Makes a batch of a list of items.
    """

    size: int
    collate: Callable[[list[Any]], Any] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.size, int) or isinstance(self.size, bool) or self.size < 1:
            msg = f"batch must be a whole number of at least 1, got {self.size!r}"
            raise ConfigError(msg)
        if self.collate is not None and not callable(self.collate):
            msg = f"collate must be a function of a list of items, got {self.collate!r}"
            raise ConfigError(msg)
        refuse_async(self.collate)

    @classmethod
    def of(cls, size: Any, collate: Any, max_wait_s: Any = None) -> Self | None:
        """Return how items are put together, where they are.

        Raises:
            ConfigError: A value is wrong, or is about batches where there are none.
        """
        if size is not None:
            return cls(size, collate)
        for name, value in (("collate", collate), ("max_wait_s", max_wait_s)):
            if value is not None:
                msg = f"{name} is about batches; give batch= too, how many items make one"
                raise ConfigError(msg)
        return None

    def __reduce__(self) -> tuple[Any, ...]:
        if self.collate is None:
            return Batching, (self.size,)
        import cloudpickle

        return Batching, (self.size, _PickledFunction(cloudpickle.dumps(self.collate)))

    def join(self, items: list[Any]) -> Any:
        """Make a batch of ``items``."""
        return (self.collate or collate)(items)


class _PickledFunction:
    """A pickled function, loaded by its first call: so a failure to load it is an item's failure."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    @functools.cached_property
    def _function(self) -> Callable[[list[Any]], Any]:
        function: Callable[[list[Any]], Any] = pickle.loads(self._data)
        return function

    def __call__(self, items: list[Any]) -> Any:
        return self._function(items)


def collate(items: list[Any]) -> Any:
    """Stack tensors or arrays of one shape along a new first axis; anything else stays a list."""
    first = items[0]
    module, name = type(first).__module__, type(first).__name__
    if (module, name) in {("torch", "Tensor"), ("numpy", "ndarray")} and all(
        type(item) is type(first) and item.shape == first.shape and item.dtype == first.dtype
        for item in items
    ):
        return sys.modules[module].stack(items)
    return items


def separate(answer: Any, n_items: int) -> list[Any]:
    """Split a sequence, tensor or array along its first axis; a mapping's values one by one.

    Raises:
        ValueError: The answer does not have one result for each item.
        TypeError: The answer cannot be split.
    """
    if isinstance(answer, Mapping):
        columns = {key: separate(value, n_items) for key, value in answer.items()}
        return [{key: column[i] for key, column in columns.items()} for i in range(n_items)]
    if isinstance(answer, str | bytes) or not (
        isinstance(answer, Sequence) or (hasattr(answer, "shape") and hasattr(answer, "__getitem__"))
    ):
        msg = (
            f"work on a batch of {n_items} items must return a sequence, tensor, array or mapping "
            f"with {n_items} results, got {type(answer).__name__}"
        )
        raise TypeError(msg)
    n_results = len(answer) if not hasattr(answer, "shape") or answer.shape else 0
    if n_results != n_items:
        msg = f"work on a batch of {n_items} items returned {n_results} results; return one for each"
        raise ValueError(msg)
    return list(answer)
