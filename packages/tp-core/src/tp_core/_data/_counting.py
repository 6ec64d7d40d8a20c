"""How many samples a batch has that nobody has counted; apart from `Parts`, which load without torch."""

import logging
from typing import Any

from torch import Tensor

from tp_core._data._cutting import is_array, length_along
from tp_core._data._parts import Parts
from tp_core._devices._transfer import recursive_pin
from tp_core._devices._tree import tree_leaves

__all__ = ["Envelope", "count_samples", "has_fewer"]

log = logging.getLogger("tp_core")


class Envelope:
    """A batch on its way through a loader, and how many samples it was collated from.

    An object, also because torch pins any tuple as a plain list.

    Args:
        batch: The batch.
        samples: How many samples it has.
        layout: What is known of its values, for the session that moves it.
    """

    def __init__(self, batch: Any, samples: int, layout: Any = None) -> None:
        self.batch, self.samples, self.layout = batch, samples, layout

    def pin_memory(self) -> "Envelope":
        """Return an envelope of the batch in page-locked memory."""
        return Envelope(recursive_pin(self.batch), self.samples, self.layout)


def count_samples(batch: Any) -> int:
    """Return the length of the first tensor in ``batch`` that has a first dimension, else 1.

    `Parts` have their own counts, and so has a batch in an `Envelope`.
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
    if isinstance(batch, Envelope):
        return batch.samples
    lengths = (length_along(leaf) for leaf in tree_leaves(batch) if not is_array(leaf))
    return next((length for length in lengths if length is not None), 1)


def has_fewer(batch: Any, samples: int) -> bool:
    """Return whether a batch has fewer samples than were chosen for it, and log a warning then.

    A collate function that leaves samples out does not say so, and where there is one sample left, or what is
    no tensor, it is not seen.
    """
    found = count_samples(batch.batch if isinstance(batch, Envelope) else batch)
    if not 1 < found < samples:
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
