"""How many samples a batch has that nobody has counted; apart from `Parts`, which load without torch."""

from typing import Any

from torch import Tensor

from tp_core._data._parts import Parts
from tp_core._devices._tree import tree_leaves

__all__ = ["count_samples"]


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor in ``batch`` that has a first dimension, else 1.

    `Parts` have their own counts.
    """
    kind = type(batch)
    first = batch[0] if (kind is tuple or kind is list) and batch else batch
    if type(first) is Tensor:  # the common batch, at a fifth of the cost
        try:
            return first.size(0)
        except IndexError:  # a scalar
            pass
    if isinstance(batch, Parts):
        return sum(batch.counts)
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.size(0)
    return 1
