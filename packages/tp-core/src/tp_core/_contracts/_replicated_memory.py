"""The memory of a job on a device that holds a copy of everything."""

from tp_core._contracts._job import Footprint, Job, MemoryNeed
from tp_core._contracts._reserved import replicated_peak


def replicated_memory(
    job: Job,
    footprint: Footprint,
    *,
    keeps_gradients: bool | None = None,
    communication: int = 0,
    bucket_nbytes: int | None = None,
) -> MemoryNeed:
    """Return the memory that a job needs on a device that holds a copy of everything.

    Args:
        job: The job.
        footprint: The memory of training its model.
        keeps_gradients: Whether gradients stay allocated throughout, as in buckets of all-reduces; by
            default only where several batches make a step.
        communication: Communication buffers, in bytes.
        bucket_nbytes: The size of the buckets in which gradients lie, or into which they are copied where
            there are communication buffers; ``None`` without any.
    """
    if keeps_gradients is None:
        keeps = job.accumulate > 1
    else:
        keeps = keeps_gradients
    need = MemoryNeed(
        weights=footprint.weights,
        gradients=footprint.gradients,
        optimizer=footprint.optimizer_nbytes,
        communication=communication,
        activations=_beyond_states(footprint, keeps_gradients=keeps),
        free=job.free_nbytes,
        device=str(job.devices[0]),
        assumed=footprint.assumed,
        remedy=(
            "less is needed with a smaller batch and accumulate=, with precision='bf16-mixed', or where "
            "several processes hold the model, by backend 'fsdp' or 'shard': tp launch -n N script.py "
            "(pip install tp-launch)"
        ),
    )
    return need.with_reserved(
        lambda: replicated_peak(
            job, footprint, bucket_nbytes=bucket_nbytes, copies_gradients=communication > 0
        )
    )


def _beyond_states(footprint: Footprint, *, keeps_gradients: bool) -> int | None:
    """Return the peak memory of a step besides weights, gradients and optimizer state."""
    if footprint.activations is None:
        return None
    gradients = footprint.gradients
    together = max(footprint.with_gradients - gradients, 0)
    highest = footprint.activations if keeps_gradients else together
    return max(highest, footprint.update) + footprint.batch
