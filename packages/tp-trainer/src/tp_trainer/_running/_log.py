"""Numbers on their way to loggers: kept as they come, tensors on their device, and read together."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

__all__ = ["LogBuffer", "Sink"]

Sink = Callable[[Mapping[str, float], int, int], None]
"""``sink(numbers, step, epoch)`` writes the numbers of one step."""


class LogBuffer:
    """Keeps numbers until they are written.

    Args:
        sink: Where they go to; ``None`` where nobody wants them.
        every: How many optimizer steps are read together.
    """

    def __init__(self, sink: Sink | None, *, every: int = 50) -> None:
        self._sink = sink
        self.every = every
        self._pending: list[tuple[int, int, str, Any]] = []

    @property
    def is_on(self) -> bool:
        """Whether somebody wants the numbers."""
        return self._sink is not None

    def add(self, numbers: Mapping[str, Any], *, step: int, epoch: int) -> None:
        """Keep numbers of a step; tensors are not waited for."""
        if self._sink is not None:
            self._pending += [
                (step, epoch, name, value.detach().reshape(()) if isinstance(value, Tensor) else value)
                for name, value in numbers.items()
            ]

    def flush(self) -> None:
        """Read and write what is kept, one step after the other."""
        if self._sink is None or not self._pending:
            return
        pending, self._pending = self._pending, []
        tensors = [value.double() for *_, value in pending if isinstance(value, Tensor)]
        read = iter(torch.stack([t.to(tensors[0].device) for t in tensors]).tolist() if tensors else [])
        rows: dict[tuple[int, int], dict[str, float]] = {}
        for step, epoch, name, value in pending:
            number = next(read) if isinstance(value, Tensor) else float(value)
            rows.setdefault((step, epoch), {})[name] = number
        for (step, epoch), numbers in rows.items():
            self._sink(numbers, step, epoch)
