"""Memory: of tensors, counted for as long as anything, a view or a graph, holds it, and of the process."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def resident(field: str) -> int:
    """Return what Linux says of this process's memory in bytes: now, ``VmRSS``, or at most, ``VmHWM``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in lines if line.startswith(field))
    return int(line.split()[1]) * 1024


class _Memory(bytearray):
    """Memory of a tensor; unlike a plain bytearray it can be watched."""


class LiveBytes:
    """Makes tensors and counts their bytes.

    Attributes:
        now: Bytes of tensors that are alive.
        peak: The most that ever were.
    """

    def __init__(self) -> None:
        self.now = 0
        self.peak = 0

    def tensor(self, *shape: int) -> Tensor:
        """Return a tensor of ones."""
        count = torch.Size(shape).numel()
        memory = _Memory(4 * count)
        weakref.finalize(memory, self._free, len(memory))
        self.now += len(memory)
        self.peak = max(self.peak, self.now)
        return torch.frombuffer(memory, dtype=torch.float32).reshape(shape).fill_(1.0)

    def copy(self, tensor: Tensor) -> Tensor:
        """Return a counted copy, which autograd ties to the original."""
        return _Copy.apply(tensor, self)

    def _free(self, nbytes: int) -> None:
        self.now -= nbytes


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor, live: LiveBytes) -> Tensor:
        return live.tensor(*tensor.shape).copy_(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, None


@contextmanager
def without_collector() -> Iterator[None]:
    """Hold for a block in which nothing is freed but what nobody refers to."""
    gc.collect()
    # What is there already is not looked at again, which is most of a collection's time, now and later.
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def cycles_per_call(call: Any, *, warm_up: int = 3) -> int:
    """Return how many objects each call leaves for the collector, once it has run some times."""
    for _ in range(warm_up):
        call()
    left = []
    with without_collector():
        for _ in range(3):  # a thread of an earlier test may end meanwhile, and leave what it had
            call()
            left.append(gc.collect())
    return min(left)
