"""The micro-batches of a batch."""

from typing import Any

from tp_core import tree_leaves, tree_map
from tp_core.data import Parts, count_samples, length_along, split_evenly, split_rows
from tp_core.errors import StepError

from tp_pipeline._pipeline_options import PipelineOptions
from tp_pipeline._schedule import Orders


def split_batch(batch: Any, options: PipelineOptions, orders: Orders, *, is_first: bool) -> Parts:
    """Return the micro-batches of a batch.

    Args:
        batch: The batch.
        options: The options, which say how many there are.
        orders: The orders of work.
        is_first: Whether it is the first batch, which must have enough samples for all micro-batches.

    Raises:
        StepError: The batch has fewer samples than it takes, or a tensor with other rows than samples.
        ConfigError: The schedule cannot be made of this many micro-batches.
    """
    samples = count_samples(batch)
    count = options.microbatches or min(samples, 4 * orders.ranks)
    if options.microbatch_size:
        count = -(-samples // options.microbatch_size)
    if is_first:
        if samples < count:
            msg = (
                f"the first batch has {samples} samples, and backend 'pipeline' is to make {count} "
                "micro-batches of it; give larger batches or fewer microbatches"
            )
            raise StepError(msg)
        orders.check(count)
    count = max(1, min(count, samples))
    if count == 1:
        return Parts([batch], counts=[samples])
    if options.microbatch_size:
        size = options.microbatch_size
        counts = [min(size, samples - i * size) for i in range(count)]
    else:
        counts = [rows.stop - rows.start for rows in split_evenly(samples, count)]
    return Parts(_split_leaves(batch, samples, counts), counts=counts)


def _split_leaves(batch: Any, samples: int, counts: list[int]) -> list[Any]:
    """Return batches with some rows of each value; those of one row, or of none, are in all of them."""
    parts_of: dict[int, Any] = {}  # by the identity of a value, which may be in the batch twice
    for leaf in tree_leaves(batch):
        rows = len(leaf) if isinstance(leaf, list) else length_along(leaf)
        if rows is None or rows == 1:
            continue
        if rows != samples:
            msg = (
                f"the batch has {samples} samples, and a value with {rows} rows (of type "
                f"{type(leaf).__name__}), which backend 'pipeline' cannot cut into micro-batches; give "
                "each sample its row, or one row for all"
            )
            raise StepError(msg)
        parts_of[id(leaf)] = split_rows(leaf, counts)

    def part(number: int) -> Any:
        return tree_map(lambda leaf: parts_of[id(leaf)][number] if id(leaf) in parts_of else leaf, batch)

    return [part(number) for number in range(len(counts))]
