"""What an open loop asks of the trainer's own calls that user code makes within it."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tp_trainer._opening._boundaries import StepBoundaries
    from tp_trainer._running._step_events import ManualStepEvents, UnusedGradients
    from tp_trainer._running._watchdog import Watchdog


@dataclass(frozen=True, slots=True)
class RunContext:
    """What an open loop asks of the trainer's own calls that user code makes within it.

    Attributes:
        step_events: Gets the events of backward passes and optimizer steps, if a callback has any.
        watchdog: Counts each batch of an evaluation as a step, within the loop's validation.
        unused: Counts the backward passes since an optimizer has stepped, if the loop saves checkpoints.
        boundaries: Where a signal ends an evaluation, within the loop's validation.
        compares_ranks: Whether the loop itself compares what ranks hold in common.
    """

    step_events: "ManualStepEvents | None" = None
    watchdog: "Watchdog | None" = None
    unused: "UnusedGradients | None" = None
    boundaries: "StepBoundaries | None" = None
    compares_ranks: bool = False


class RunContexts:
    """The contexts of a trainer's open loops: loops may be nested, and the innermost counts.

    A loop's code calls ``trainer.evaluate(...)`` without naming the loop, so the trainer must know which
    one is open. This is the one place where it does.

    Attributes:
        current: The context of the innermost loop.
        is_plain: Whether a backward pass has shown that the next ones in this context need torch's own alone.
        reductions: How many backward passes outside of loops have reduced gradients over ranks.
    """

    def __init__(self) -> None:
        self.current = RunContext()
        self.is_plain = False
        self.reductions = 0

    @contextmanager
    def within(self, **changes: Any) -> Iterator[None]:
        """Change fields of the current context, and restore them at the end."""
        before = self.current
        self.current, self.is_plain = replace(before, **changes), False
        try:
            yield
        finally:
            self.current, self.is_plain = before, False
