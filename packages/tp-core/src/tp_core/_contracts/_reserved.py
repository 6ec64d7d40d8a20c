"""The memory that an allocator reserves in training: a model of it follows the blocks of a traced step."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import Tensor

from tp_core._contracts._job import Footprint, Job
from tp_core._contracts._segments import CachingAllocator


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
