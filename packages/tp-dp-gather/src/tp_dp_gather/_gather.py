"""From the parts' outputs to one output."""

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from tp_core.errors import ConfigError
from tp_core.internal import containers

__all__ = ["Gathering", "sorted_by_device"]

_TABLE = containers()


class Gathering:
    """One gathering of outputs: what goes where, and which keys there were.

    Tensors are concatenated on the device, scalars are stacked to a vector, ``None`` stays ``None``,
    containers are gone through, and all else becomes a list with an entry per part. What stands
    under one of the ``kept`` keys, at any depth, becomes a tuple of parts that stay where they are.

    Args:
        device: Where the tensors go.
        dim: The dimension to concatenate along.
        kept: The keys whose values are not gathered.

    Attributes:
        keys: All keys that were met.
    """

    def __init__(self, device: torch.device, dim: int, kept: Collection[str]) -> None:
        self._device = device
        self._dim = dim
        self._kept = kept
        self.keys: set[str] = set()

    def gather(self, outputs: Sequence[Any], path: str = "output") -> Any:
        """Return one output made of the parts' outputs.

        Raises:
            ConfigError: ``outputs`` is empty, or its elements differ in structure.
        """
        if not outputs:
            msg = "there are no outputs to gather"
            raise ConfigError(msg)
        first = outputs[0]
        if isinstance(first, Tensor):
            return self._join(outputs, path)
        if all(o is None for o in outputs):
            return None
        container = _TABLE[type(first)]
        if container is None:
            return list(outputs)
        names = _names(first)
        for i, other in enumerate(outputs):
            if (
                type(other) is not type(first)
                or _names(other) != names
                or len(_children(other)) != len(_children(first))
            ):
                msg = (
                    f"the parts' outputs must have one structure: {path} is {_describe(first)} in part 0 "
                    f"and {_describe(other)} in part {i}; keep it in parts with except_keywords or "
                    "gather_to_one_device=False"
                )
                raise ConfigError(msg)
        columns = zip(*map(_children, outputs), strict=True)
        values = []
        for i, column in enumerate(columns):
            name = names[i] if names is not None else None
            if isinstance(name, str):
                self.keys.add(name)
            if name in self._kept:
                values.append(tuple(column))
            else:
                values.append(self.gather(column, f"{path}[{i if name is None else name!r}]"))
        return container.rebuild(first, values)

    def _join(self, outputs: Sequence[Any], path: str) -> Tensor:
        for i, other in enumerate(outputs):
            if not isinstance(other, Tensor):
                msg = f"{path} is a tensor in part 0 and {_describe(other)} in part {i}; return one structure"
                raise ConfigError(msg)
        wait = self._device.type == "cpu"  # or it would be read before it is there
        moved = [o.to(self._device, non_blocking=not wait) for o in outputs]
        return torch.stack(moved) if moved[0].dim() == 0 else torch.cat(moved, self._dim)


def sorted_by_device(outputs: Sequence[Any], devices: Sequence[torch.device]) -> list[Any]:
    """Return the outputs in the order of their devices' types and indices, not of ``device_ids``."""
    order = sorted(range(len(outputs)), key=lambda i: (devices[i].type, devices[i].index or 0))
    return [outputs[i] for i in order]


def _children(value: Any) -> Collection[Any]:
    container = _TABLE[type(value)]
    return () if container is None else container.children(value)


def _names(value: Any) -> list[Any] | None:
    """Return the keys or field names of a container, ``None`` for lists and plain tuples."""
    if isinstance(value, Mapping):
        return list(value)
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        return None if fields is None else list(fields)
    if dataclasses.is_dataclass(value):
        return [f.name for f in dataclasses.fields(value) if hasattr(value, f.name)]
    return None


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {list(value)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
