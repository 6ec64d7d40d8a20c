"""The position of a run, and the optimizer steps at which something is due."""

import math
from dataclasses import dataclass

from tp_core.data import Share


class Position:
    """Counts the batches and the optimizer steps of a run.

    Args:
        batches: The batches in an epoch.
        accumulate: The batches in an optimizer step; the last step of an epoch may have fewer.

    Attributes:
        done: The batches of this epoch that are done.
        ends_step: Whether the current batch is the last one of an optimizer step.
        is_in_step: Whether the code of a step runs now; its numbers are those of the next step.
        share: The samples of the current batch; ``None`` before the first.
    """

    def __init__(self, batches: int, accumulate: int) -> None:
        self.batches = batches
        self.accumulate = accumulate
        self.done = 0
        self.ends_step = True
        self.is_in_step = False
        self.share: Share | None = None
        self._steps_before = 0  # of the epochs before this one

    @property
    def step(self) -> int:
        """Optimizer steps made so far, over all epochs, those before a resume included."""
        steps = self.done // self.accumulate
        if self.done >= self.batches:
            steps = -(-self.done // self.accumulate)
        return self._steps_before + steps

    def resume(self, step: int, done: int) -> None:
        """Continue after ``step`` optimizer steps, with ``done`` batches of the current epoch."""
        self._steps_before = step - done // self.accumulate
        self.done = done

    def end_epoch(self) -> None:
        """Continue at the first batch of the next epoch."""
        self._steps_before = self.step  # before `done` is reset, from which it is computed
        self.done = 0

    def batches_after(self, steps: int) -> int:
        """Return the batches done after ``steps`` further optimizer steps, at most those of the epoch."""
        return min((self.done // self.accumulate + steps) * self.accumulate, self.batches)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSchedule:
    """What is due by the number of optimizer steps; ``None`` for what is not.

    Attributes:
        log_every: The steps between two rows of the log.
        validate_every: The steps between two validations.
        save_every: The steps between two checkpoints.
        last_step: The step after which the run ends.
    """

    log_every: int | None
    validate_every: int | None
    save_every: int | None
    last_step: int | None

    def next_after(self, step: int) -> float:
        """Return how many steps after ``step`` something is due next; infinity if nothing is."""
        periods = (self.log_every, self.validate_every, self.save_every)
        distances = [every - step % every for every in periods if every is not None]
        if self.last_step is not None:
            distances.append(max(self.last_step - step, 1))
        return min(distances, default=math.inf)
