"""The memory that an allocator reserves in training: a model of it follows the blocks of a traced step."""

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from tp_core._contracts._job import Footprint, Job
from tp_core._contracts._segments import CachingAllocator
from tp_core.device_types import memory_block

_STEPS = 3
"""The first one makes the optimizer's state, the second other buckets; the third is like all later ones."""

_BROADCAST_NBYTES = 250 * 2**20
"""The bytes of weights that torch's DistributedDataParallel sends together at the start."""


def nbytes_of(job: Job, tensor: Tensor) -> int:
    """Return the bytes of a tensor of the model in the precision of a job."""
    size = tensor.element_size()
    if job.precision == "bf16-true" and tensor.is_floating_point():
        size = torch.bfloat16.itemsize
    return tensor.numel() * size


def updated(footprint: Footprint) -> tuple[Sequence[Sequence[Any]], Sequence[Sequence[Any]]]:
    """Return the events of an optimizer's first step, and those of a later one."""
    events = list(footprint.update_trace)
    at = next((i for i, (what, *_) in enumerate(events) if what == "again"), len(events))
    return events[:at], events[at + 1 :]


class Replay:
    """Plays events of a trace on an allocator; those of each time have keys of their own.

    Args:
        allocator: The allocator.
    """

    def __init__(self, allocator: CachingAllocator) -> None:
        self.allocator = allocator
        self._numbers = count()
        self._gradients: dict[str, Hashable] = {}

    def hold(self, sizes: Iterable[int], *, stream: int = 0) -> list[Hashable]:
        """Allocate memory that stays; return the keys of it."""
        keys: list[Hashable] = []
        for nbytes in sizes:
            keys.append(next(self._numbers))
            self.allocator.allocate(keys[-1], nbytes, stream=stream)
        return keys

    def drop(self, keys: Iterable[Hashable]) -> None:
        """Free memory."""
        for key in keys:
            self.allocator.free(key)

    def play(
        self,
        events: Iterable[Sequence[Any]],
        on_gradient: Callable[[str, Hashable], bool],
        on_mark: Callable[[str, str], None] = lambda *_: None,
    ) -> None:
        """Play events to their end, and free what is left but for what stays.

        Args:
            events: The events.
            on_gradient: Called with a parameter's name and the key of its gradient, which the step has just
                computed; returns whether the gradient stays.
            on_mark: Called with "begin" or "end" and a module's name, and with "backward".
        """
        here = next(self._numbers)
        living: set[Hashable] = set()
        staying: set[Hashable] = set()
        for what, number, nbytes, name in events:
            key = (here, number)
            if what in {"value", "fixed", "state"}:
                self.allocator.allocate(key, nbytes)
                living.add(key)
                if what == "state":
                    staying.add(key)
            elif what == "gradient":
                if on_gradient(name, key):
                    staying.add(key)
                else:
                    self.allocator.free(key)
                    living.discard(key)
            elif what == "free":
                if key not in staying:
                    self.allocator.free(key)
                    living.discard(key)
            else:
                on_mark(what, name)
        self.drop(living - staying)


def replicated_peak(
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
        replay.drop(replay.hold(_filled((nbytes_of(job, t) for t in tensors), _BROADCAST_NBYTES)))
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
                small = 2**20 if bucket_nbytes > 2**20 else bucket_nbytes
                buckets = replay.hold(_filled((trained[name] for name in order), bucket_nbytes, first=small))
            replay.play(events, on_gradient)
        if not step and not first:
            replay.hold(n for n in trained.values() for _ in range(2))  # assumed, as AdamW has
        replay.play(later if step else first, on_update)
        replay.drop(replay.hold([memory_block(job.devices[0].type)] * (len(trained) + 2)))
    return allocator.peak


def _filled(sizes: Iterable[int], nbytes: int, *, first: int | None = None) -> Iterator[int]:
    """Yield the sums of neighbors that reach a size, and of the rest; ``first`` is that of the first sum."""
    total, limit = 0, nbytes if first is None else first
    for size in sizes:
        total += size
        if total >= limit:
            yield total
            total, limit = 0, nbytes
    if total:
        yield total
