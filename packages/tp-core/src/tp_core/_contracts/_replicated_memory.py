"""The memory of a job on a device that holds a copy of everything."""

from collections.abc import Hashable, Iterable, Iterator

from tp_core._contracts._job import Footprint, Job, MemoryNeed
from tp_core._contracts._reserved import Replay, nbytes_of, updated
from tp_core.device_types import memory_block

_STEPS = 3
"""The first one makes the optimizer's state, the second other buckets; the third is like all later ones."""

_BROADCAST_NBYTES = 250 * 2**20
"""The bytes of weights that torch's DistributedDataParallel sends together at the start."""


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
        lambda: _reserved_peak(
            job, footprint, bucket_nbytes=bucket_nbytes, copies_gradients=communication > 0
        )
    )


def _beyond_states(footprint: Footprint, *, keeps_gradients: bool) -> int | None:
    """Return the peak memory of a step besides weights, gradients and optimizer state."""
    if footprint.activations is None:
        return None
    gradients = footprint.gradients
    together = max(footprint.with_gradients - gradients, 0)
    highest = together
    if keeps_gradients:
        highest = footprint.activations
    return max(highest, footprint.update) + footprint.batch


def _reserved_peak(
    job: Job, footprint: Footprint, *, bucket_nbytes: int | None, copies_gradients: bool
) -> int | None:
    """Return what is reserved on a device that holds a copy of everything; ``None`` if that is not known.

    Args:
        job: The job.
        footprint: The memory of training its model.
        bucket_nbytes: The bytes of the buckets of gradients; ``None`` without any.
        copies_gradients: Whether gradients are copied into buckets, and stay beside them.
    """
    allocator = job.new_allocator()
    if allocator is None or job.model is None or not footprint.trace:
        return None
    replay = Replay(allocator)
    tensors = [*job.model.parameters(), *job.model.buffers()]
    replay.hold(nbytes_of(job, tensor) for tensor in tensors)
    trained = {n: nbytes_of(job, p) for n, p in job.model.named_parameters() if p.requires_grad}
    buckets: list[Hashable] = []
    if bucket_nbytes is not None:
        replay.drop(replay.hold(_bucket_sizes((nbytes_of(job, t) for t in tensors), _BROADCAST_NBYTES)))
        buckets = replay.hold([sum(trained.values())])
    events = [event for event in footprint.trace if event[0] != "batch"]
    batch_sizes = [nbytes for what, _, nbytes, _ in footprint.trace if what == "batch"]
    first, later = updated(footprint)
    gradients: dict[str, Hashable] = {}
    batch: list[Hashable] = []

    def on_gradient(name: str, key: Hashable) -> bool:
        is_added = name in gradients
        if is_added or (bucket_nbytes is not None and not copies_gradients):
            return False
        gradients[name] = key
        return True

    def on_update(*_: object) -> bool:
        return False

    for step in range(_STEPS):
        for accumulated in range(min(job.accumulate, 2)):
            following = replay.hold(batch_sizes)
            replay.drop(batch)
            batch = following
            if not accumulated:
                replay.drop(gradients.values())
                gradients.clear()
            if step == 1 and not accumulated and bucket_nbytes is not None:
                # By the order in which gradients came; the first one is small, to be sent early.
                order = [name for what, _, _, name in events if what == "gradient" and name in trained]
                replay.drop(buckets)
                sizes = _bucket_sizes(
                    (trained[name] for name in order), bucket_nbytes, first=min(bucket_nbytes, 2**20)
                )
                buckets = replay.hold(sizes)
            replay.play(events, on_gradient)
        if not step and not first:
            replay.hold(n for n in trained.values() for _ in range(2))  # assumed, as AdamW has
        update = later
        if not step:
            update = first
        replay.play(update, on_update)
        replay.drop(replay.hold([memory_block(job.devices[0].type)] * (len(trained) + 2)))
    return allocator.peak


def _bucket_sizes(sizes: Iterable[int], nbytes: int, *, first: int | None = None) -> Iterator[int]:
    """Yield the sizes of buckets: a bucket ends with the tensor that fills it up to ``nbytes``.

    Args:
        sizes: The sizes of the tensors, in order.
        nbytes: The size from which on a bucket is full.
        first: That of the first bucket; by default ``nbytes``.
    """
    total, limit = 0, first or nbytes
    for size in sizes:
        total += size
        if total >= limit:
            yield total
            total, limit = 0, nbytes
    if total:
        yield total
