"""The micro-batches of a batch."""

from typing import Any

from tp_core.data import Parts, Scattering, split_evenly
from tp_core.errors import StepError

from tp_pipeline._pipeline_options import PipelineOptions
from tp_pipeline._schedule import Orders


def split_batch(
    batch: Any,
    scattering: Scattering,
    options: PipelineOptions,
    orders: Orders,
    *,
    is_first: bool,
    share: int,
) -> Parts:
    """Return the micro-batches of a batch.

    Args:
        batch: The batch.
        scattering: What of it has a row for each sample.
        options: The options, which say how many there are.
        orders: The orders of work.
        is_first: Whether it is the first batch, which must have enough samples for all micro-batches.
        share: The samples of a whole batch, as the loader says; 0 if it is not known. A run that is resumed
            may begin with the last batch of an epoch, which has fewer.

    Raises:
        StepError: The batch has fewer samples than it takes.
        ConfigError: The schedule cannot be made of this many micro-batches; or a value has other rows than
            samples, or may have them, and the options do not say what it is.
    """
    values: dict[str | int, Any] = {"batch": batch}
    samples = scattering.rows(values) or 1
    if is_first:
        whole = max(samples, share)
        count = _micro_batches(whole, options, orders)
        if whole < count:
            msg = (
                f"the first batch has {whole} samples, and backend 'pipeline' is to make {count} "
                "micro-batches of it; give larger batches or fewer microbatches"
            )
            raise StepError(msg)
        orders.check(count)
    count = max(1, min(_micro_batches(samples, options, orders), samples))
    if count == 1:
        return Parts([batch], counts=[samples])
    if options.microbatch_size:
        size = options.microbatch_size
        counts = [min(size, samples - i * size) for i in range(count)]
    else:
        counts = [rows.stop - rows.start for rows in split_evenly(samples, count)]
    return Parts([part["batch"] for part in scattering.parts(values, counts)], counts=counts)


def _micro_batches(samples: int, options: PipelineOptions, orders: Orders) -> int:
    """Return the number of micro-batches that the options ask for."""
    if options.microbatch_size:
        return -(-samples // options.microbatch_size)
    return options.microbatches or min(samples, 4 * orders.ranks)
