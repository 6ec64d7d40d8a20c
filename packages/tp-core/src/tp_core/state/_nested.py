"""Nested values as plain ones, with the tensors in them stored elsewhere by name."""

from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from tp_core._tensors._nested import leaves_in
from tp_core.state._plain import StoredTensor

__all__ = ["Get", "Put", "joined", "refs_in", "split", "tensors_in"]

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
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {k: split(v, f"{name}.{k}", parameter, put) for k, v in value.items()}
    return value


def joined(value: Any, parameter: Tensor | None, get: Get) -> Any:
    """Return what :func:`split` was given."""
    if isinstance(value, StoredTensor):
        return get(value, parameter)
    if isinstance(value, list | tuple):
        items = [joined(v, parameter, get) for v in value]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, dict):
        return {k: joined(v, parameter, get) for k, v in value.items()}
    return value


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Yield the tensors in a nested value."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, Tensor))


def refs_in(value: Any) -> Iterator[StoredTensor]:
    """Yield what stands for tensors in a nested value."""
    return (leaf for leaf in leaves_in(value) if isinstance(leaf, StoredTensor))
