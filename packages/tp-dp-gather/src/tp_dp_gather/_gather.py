"""The gather: the outputs of the parts become one output."""

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence
from tp_core import containers, recursive_to, to_device
from tp_core.data import cat_rows, holds_values, is_array, is_sequence, keys_of, length_along
from tp_core.errors import ConfigError

_CONTAINERS = containers()


class Gathering:
    """The gather of one call's outputs.

    Tensors are concatenated on the device, scalars are stacked to a vector, ``None`` stays ``None``.
    Containers are searched, and all else becomes a list with an entry per part. Where it is known how
    many rows each part had, lists and arrays with an entry for each become one. Values under a
    ``kept`` key, at any depth, become tuples of parts that stay on their devices.

    Args:
        device: The device of the result.
        dim: The dimension to concatenate along.
        kept: Keys of values that are not gathered.
        sizes: How many rows each part had, if that is known.
    """

    def __init__(
        self, device: torch.device, dim: int, kept: Collection[str], sizes: Sequence[int] | None = None
    ) -> None:
        self._device = device
        self._dim = dim
        self._kept = kept
        self._sizes = sizes
        self.keys: set[str] = set()

    def gather(self, outputs: Sequence[Any], path: str = "output") -> Any:
        """Join the parts' outputs to one output.

        Collectives: forward gathers the parts; backward scatters the output's gradient to them.
        """
        if not outputs:
            msg = "there are no outputs to gather"
            raise ConfigError(msg)
        first = outputs[0]
        if isinstance(first, Tensor):
            return self._join(outputs, path)
        if all(o is None for o in outputs):
            return None
        if isinstance(first, PackedSequence) or (is_array(first) and self._has_rows(outputs, path)):
            return self._join(outputs, path)
        container = _CONTAINERS[type(first)]
        if container is None:
            return list(outputs)
        if is_sequence(first) and self._are_samples(outputs, path):
            return type(first)(entry for output in outputs for entry in recursive_to(output, self._device))
        labels = list(container.labels(first))
        for i, other in enumerate(outputs):
            if type(other) is not type(first) or list(container.labels(other)) != labels:
                msg = (
                    f"the parts' outputs must have one structure: {path} is {_describe(first)} in part 0 "
                    f"and {_describe(other)} in part {i}; keep it in parts with except_keywords or "
                    "gather_to_one_device=False"
                )
                raise ConfigError(msg)
        columns = zip(*map(container.children, outputs), strict=True)
        values = []
        for key, column in zip(keys_of(first), columns, strict=True):
            if isinstance(key, str):
                self.keys.add(key)
            if key in self._kept:
                values.append(tuple(column))
            else:
                values.append(self.gather(column, f"{path}[{key!r}]"))
        return container.rebuild(first, values)

    def _join(self, outputs: Sequence[Any], path: str) -> Any:
        if isinstance(outputs[0], Tensor):
            kind = Tensor
        else:
            kind = type(outputs[0])
        for i, other in enumerate(outputs):
            if not isinstance(other, kind):
                msg = (
                    f"{path} is {_describe(outputs[0])} in part 0 and {_describe(other)} in part {i}; return "
                    "one structure"
                )
                raise ConfigError(msg)
        if kind is not Tensor:
            return cat_rows(recursive_to(list(outputs), self._device), self._dim)
        moved = [to_device(output, self._device) for output in outputs]
        if moved[0].dim() == 0:
            return torch.stack(moved)
        self._has_rows(moved, path)
        return cat_rows(moved, self._dim)

    def _has_rows(self, outputs: Sequence[Any], path: str) -> bool:
        """Return whether all parts have their rows along the dimension; ``False`` for nested tensors."""
        if (
            self._sizes is None
            or len(outputs) < 2
            or (isinstance(outputs[0], Tensor) and outputs[0].is_nested)
        ):
            return False
        shapes = [tuple(output.shape) for output in outputs]
        if all(length_along(o, self._dim) == n for o, n in zip(outputs, self._sizes, strict=True)):
            other_sizes = {(*s[: self._dim], *s[self._dim + 1 :]) for s in shapes}
            if len(other_sizes) == 1:
                return True
            remedy = "only their rows may differ: pad them to one length"
        else:
            dims = range(min(map(len, shapes)))
            sizes = list(self._sizes)
            dims_of_rows = [dim for dim in dims if [shape[dim] for shape in shapes] == sizes]
            if not dims_of_rows:
                return False
            remedy = f"the rows are along dim {dims_of_rows[0]}: return them along dim {self._dim}"
        msg = (
            f"{path} cannot be joined along dim {self._dim}: its shapes are "
            f"{' and '.join(map(str, shapes))} for parts of {list(self._sizes)} rows, and {remedy}, or keep "
            "it in parts with except_keywords or gather_to_one_device=False"
        )
        raise ConfigError(msg)

    def _are_samples(self, outputs: Sequence[Any], path: str) -> bool:
        """Return whether a list or tuple has an entry for each row of its part, and not for each value."""
        sizes = self._sizes
        if sizes is None:
            return False
        lengths = [len(o) if is_sequence(o) else -1 for o in outputs]
        if lengths != list(sizes):
            return False
        if len(set(sizes)) > 1:
            return True
        if all(holds_values(o, n, self._dim) for o, n in zip(outputs, sizes, strict=True)):
            return False
        tensors = [leaf for leaf in outputs[0] if isinstance(leaf, Tensor)]
        scalars = bool(tensors) and not any(t.dim() for t in tensors)
        if isinstance(outputs[0], list) and not scalars:
            return True
        if (isinstance(outputs[0], tuple) and scalars) or any(sizes[0] in t.shape for t in tensors):
            return False  # values: a loss and a score, or rows along another dimension, refused there
        msg = (
            f"{path} is {_describe(outputs[0])} of each part, which has as many rows: it may have an entry "
            "for each of them or not: return one tensor, torch.stack(values), or keep it in parts with "
            "except_keywords or gather_to_one_device=False"
        )
        raise ConfigError(msg)


def sorted_by_device(outputs: Sequence[Any], devices: Sequence[torch.device]) -> list[Any]:
    """Return the outputs in the order of their devices' types and indices, not of ``device_ids``."""
    order = sorted(range(len(outputs)), key=lambda i: (devices[i].type, devices[i].index or 0))
    return [outputs[i] for i in order]


def _describe(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {list(value)}"
    if isinstance(value, list | tuple):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a {type(value).__name__}"
