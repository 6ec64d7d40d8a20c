"""What a job needs of memory where each device holds a copy of everything."""

from tp_core._contracts._job import Job
from tp_core._contracts._memory import Footprint, MemoryNeed

__all__ = ["need_of_copy"]


def need_of_copy(
    job: Job, footprint: Footprint, *, keeps_gradients: bool | None = None, communication: int = 0
) -> MemoryNeed:
    """Return what a job needs on a device that holds a copy of everything.

    Args:
        job: The job.
        footprint: What training its model takes.
        keeps_gradients: Whether gradients have their memory throughout, as in buckets of all-reduces; by
            default where several batches make a step.
        communication: Buffers of exchanges, in bytes.
    """
    keeps = job.accumulate > 1 if keeps_gradients is None else keeps_gradients
    return MemoryNeed(
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
            "several processes hold the model: tp launch -n N script.py with backend 'fsdp' or 'shard'"
        ),
    )


def _beyond_states(footprint: Footprint, *, keeps_gradients: bool) -> int | None:
    """Return what a step has at its highest point besides weights, gradients and optimizer state."""
    if footprint.activations is None:
        return None
    gradients = footprint.gradients
    together = max(footprint.with_gradients - gradients, 0)
    highest = footprint.activations if keeps_gradients else together
    return max(highest, footprint.update) + footprint.batch
