"""The training loop. The hot path: what is not needed in a step is not in it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from torch import Tensor
from tp_core.errors import LoaderError
from tp_core.plugins import StepOutput

from tp_trainer._steps._meter import Meter, loss_of
from tp_trainer._steps._optimizer_step import OptimizerStep
from tp_trainer._steps._precision import RunStep, Step

__all__ = ["Scheduler", "TrainingLoop"]


class Scheduler(Protocol):
    """A learning-rate scheduler, as far as the loop needs it."""

    def step(self) -> None:
        """Move on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingLoop:
    """Trains on the batches of an epoch.

    Attributes:
        run: Runs the user's step where the session wants it.
        step: The user's step.
        optimizer_step: Makes the optimizer steps.
        scheduler: Moved on after every optimizer step, or ``None``.
        steps: How many batches make an epoch.
    """

    run: RunStep
    step: Step
    optimizer_step: OptimizerStep
    scheduler: Scheduler | None
    steps: int

    def train_epoch(
        self, batches: Iterable[Any], *, first: int, meter: Meter, on_step: Callable[[int], float]
    ) -> None:
        """Train on the batches of one epoch.

        Args:
            batches: The prepared loader.
            first: How many batches of the epoch are done already; the loader stands behind them.
            meter: Adds up what the steps return.
            on_step: Called between optimizer steps with the number of done batches; returns at which
                number it is to be called again.

        Raises:
            StepError: The step returned no usable loss.
            NonFiniteLossError: The loss or the gradients are NaN or infinite.
            LoaderError: The loader ended before the last batch of the epoch.
        """
        run, step, steps, accumulate = self.run, self.step, self.steps, self.optimizer_step.accumulate
        update, scheduler = self.optimizer_step, self.scheduler
        model, no_sync, zero_grad = update.model, update.session.no_sync, update.optimizer.zero_grad
        add, backward, finish = meter.add, update.backward, update.finish
        begin_step = meter.begin_step if meter.tolerates else None

        def learn(batch: Any) -> StepOutput:
            output = run(step, model, batch)
            # A scalar alone is what nearly every step returns: to look at more costs as much as all else.
            if type(output) is Tensor and output.requires_grad and not output.dim():
                loss = output
            else:
                loss = loss_of(output, training=True)
            weight = add(loss, output)
            if weight is None:
                backward(loss)
            else:
                update.weighted_backward(loss, weight)
            return output

        done = first
        begins = True
        next_call = on_step(done)
        for batch in islice(batches, steps - first):
            done += 1
            if begins:
                zero_grad()
                if begin_step is not None:
                    begin_step()
            begins = accumulate == 1 or done % accumulate == 0 or done == steps
            if not begins:
                with no_sync(model):
                    learn(batch)
                continue
            # Kept until the next one is there: to free the graph before the optimizer steps takes longer.
            output = learn(batch)  # noqa: F841
            if not finish():
                if not update.is_empty:
                    meter.forget_step()
            elif scheduler is not None:
                scheduler.step()
            if done >= next_call:
                next_call = on_step(done)
        if done < steps:
            msg = (
                f"the loader ended after {done} of {steps} batches; give steps_per_epoch={done}, or a "
                "loader that has as many batches as it says"
            )
            raise LoaderError(msg)
        meter.flush()
