"""Prepared schedulers, which step when their optimizer does."""

import math
from collections.abc import Callable
from typing import Any

from torch.optim.lr_scheduler import LRScheduler


class AcceleratedScheduler:
    """A prepared scheduler: it steps when the optimizer does, once for each process unless batches are split.

    Args:
        scheduler: The user's own.
        ends_step: Whether the batch at hand ends an optimizer step; ``None`` to step whenever it is called.
        times: How often the user's own steps then.
    """

    def __init__(self, scheduler: Any, *, ends_step: Callable[[], bool] | None, times: int) -> None:
        self.scheduler = scheduler
        self._ends_step = ends_step
        self._times = times

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "_ends_step", "_times"):
            raise AttributeError(name)
        return getattr(self.scheduler, name)

    def step(self, *args: Any, **options: Any) -> None:
        """Step, if the optimizer does."""
        scheduler = self.scheduler
        if self._ends_step is None:
            scheduler.step(*args, **options)
            return
        if not self._ends_step():
            if isinstance(scheduler, LRScheduler):
                scheduler._step_count += 1  # as Accelerate has it: torch warns at a count that stands still
            return
        for _ in range(self._times):
            if getattr(scheduler, "total_steps", math.inf) >= scheduler._step_count:
                scheduler.step(*args, **options)
