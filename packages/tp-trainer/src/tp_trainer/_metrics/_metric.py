"""What a metric is, and metrics out of functions of the whole set."""

from collections.abc import Callable
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor
from tp_core import tree_map
from tp_core.errors import ConfigError
from tp_core.internal import join_rows

from tp_trainer._metrics._rounds import on_cpu

__all__ = ["FunctionMetric", "Metric"]


@runtime_checkable
class Metric(Protocol):
    """Something that is fed with batches and computes one result of all, as in torchmetrics and torcheval."""

    def update(self, *args: Any, **kwargs: Any) -> object:
        """Take in what a step returned for a batch."""

    def compute(self) -> Any:
        """Return the result for all that was taken in since the last reset: a number, or a dict of such."""

    def reset(self) -> object:
        """Forget all."""


class FunctionMetric:
    """A metric out of a function of the whole set, such as those of scikit-learn.

    It keeps all rows that it is given, on the CPU, until the next evaluation. The step returns the
    function's arguments: a tuple in their order, or a dict by their names.

    Args:
        function: Gets the rows of all samples, in the order of the data, and returns a number, or a dict of
            numbers. Give further arguments by ``functools.partial``.
        arrays: Whether tensors are given to it as "numpy" arrays, or as "torch" tensors.

    Raises:
        ConfigError: ``function`` cannot be called, or ``arrays`` is something else.

    Example:
        >>> from functools import partial
        >>> metric = FunctionMetric(lambda right, said: (right == said).mean())
        >>> metric.update(torch.tensor([1, 0, 1]), torch.tensor([1, 1, 1]))
        >>> metric.update(torch.tensor([0]), torch.tensor([0]))
        >>> metric.compute()
        np.float64(0.75)
    """

    def __init__(self, function: Callable[..., Any], *, arrays: Literal["numpy", "torch"] = "numpy") -> None:
        if not callable(function):
            got = f"{type(function).__name__}: {function!r}"
            msg = f"a FunctionMetric needs a function of all samples, got {got}"
            raise ConfigError(msg)
        if arrays not in {"numpy", "torch"}:
            msg = f"arrays={arrays!r} must be 'numpy' or 'torch': what the function of a metric is given"
            raise ConfigError(msg)
        self._function = function
        self._as_numpy = arrays == "numpy"
        self._pieces: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

    def update(self, *args: Any, **kwargs: Any) -> None:
        """Keep the rows of a batch."""
        self._pieces.append(tree_map(on_cpu, (args, kwargs)))

    def compute(self) -> Any:
        """Return the function's result for all rows.

        Raises:
            StepError: The rows of the batches cannot be joined.
        """
        args, kwargs = join_rows(self._pieces)
        if self._as_numpy:
            args, kwargs = tree_map(_as_numpy, (args, kwargs))
        return self._function(*args, **kwargs)

    def reset(self) -> None:
        """Forget all rows."""
        self._pieces = []


def _as_numpy(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return leaf
    return (leaf.float() if leaf.dtype == torch.bfloat16 else leaf).numpy()  # numpy does not know the type
