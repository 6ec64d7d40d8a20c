"""How many samples a batch has that nobody has counted; apart from `Parts`, which load without torch."""

import logging
from typing import Any

from torch import Tensor

from tp_core._data._parts import Parts
from tp_core._devices._tree import tree_leaves

__all__ = ["count_samples", "has_fewer"]

log = logging.getLogger("tp_core")


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


def has_fewer(batch: Any, samples: int) -> bool:
    """Return whether a batch has fewer samples than were chosen for it, and log a warning then.

    A collate function that leaves samples out does not say so, and where there is one sample left, or what is
    no tensor, it is not seen.
    """
    if not 1 < (found := count_samples(batch)) < samples:
        return False
    log.warning(
        "the first tensor of a batch has %d rows, and %d samples were chosen for it: if collate_fn leaves "
        "samples out, the batch counts as %d in means over samples, and in gradients on several ranks and "
        "where batches are accumulated; return how many it has from the step, as 'weight'",
        found,
        samples,
        samples,
    )
    return True
