"""One call of ``fit``: the steps of one model and one optimizer, on top of the loop."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tp_core.plugins import PreparedLoader, StepOutput

from tp_trainer._metrics._evaluation import Validation, metric_for_scheduler
from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._running._duties import Duties
from tp_trainer._running._history import History
from tp_trainer._running._loop import Loop
from tp_trainer._running._settings import FitSettings
from tp_trainer._steps._optimizer_step import OptimizerStep
from tp_trainer._steps._step import (
    RunStep,
    Step,
    loss_of,
    modes_kept,
    parameters_of,
    run_watched,
    tell_of_no_gradients,
)

__all__ = ["Fit", "Scheduler", "fit", "fit_duties"]


class Scheduler(Protocol):
    """A learning-rate scheduler, as far as the loop needs it."""

    def step(self) -> None:
        """Move on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What ``fit`` does with a batch, and what it needs for that.

    Attributes:
        settings: What is done with each batch.
        optimizer_step: Makes the optimizer steps.
        run: Runs the user's step where the session wants it.
        validation: What the run is evaluated on, or ``None``.
        after_epoch: Called after every epoch.
    """

    settings: FitSettings
    optimizer_step: OptimizerStep
    run: RunStep
    validation: Validation | None
    after_epoch: Callable[[], None]


def fit_duties(work: Fit, train: PreparedLoader) -> Duties:
    """Return what the loop has to have done for it between the batches of ``fit``."""
    settings, optimizer_step, validation = work.settings, work.optimizer_step, work.validation

    def validate(boundaries: StepBoundaries | None, most: int | None) -> Mapping[str, float]:
        if validation is None:
            return {}
        epoch = max(train.next_epoch - 1, 0)
        session, model = optimizer_step.session, optimizer_step.model
        return validation.evaluate(session, model, epoch=epoch, boundaries=boundaries, most=most)

    def advance(trained: Mapping[str, float], found: Mapping[str, float]) -> None:
        scheduler = settings.scheduler
        if scheduler is None or settings.scheduler_every != "epoch":
            return
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(metric_for_scheduler(settings.monitor, trained, found, validates=bool(found)))
        else:
            scheduler.step()

    return Duties(
        validate=None if validation is None else validate,
        check=optimizer_step.check_parameters,
        advance=advance,
        after_epoch=work.after_epoch,
        tolerates=settings.gradients.nonfinite == "skip",
        counts=False,
    )


def fit(loop: Loop, work: Fit) -> History:
    """Train until the loop has no batch left.

    Raises:
        StepError: The step returned no usable loss.
        NonFiniteLossError: The loss or the gradients are NaN or infinite.
        LoaderError: The loader ended before the last batch of the epoch.
    """
    model, events = work.optimizer_step.model, work.settings.events
    if events.has("on_optimizer_step"):
        work.optimizer_step.tell(lambda norm: events.send("on_optimizer_step", loop, norm))
    with modes_kept(model):
        model.train()  # before the run begins: who takes part in it may freeze modules
        with loop:
            for number, batches in enumerate(loop.by_epoch()):
                _train_epoch(loop, batches, work, is_first=not number)
    return loop.history


def _train_epoch(loop: Loop, batches: Iterator[Any], work: Fit, *, is_first: bool) -> None:
    """Train on the batches of an epoch. The hot path: what is not needed in a step is not in it."""
    run, step, update, meter = work.run, work.settings.training_step(), work.optimizer_step, loop.meter
    scheduler = work.settings.scheduler if work.settings.scheduler_every == "step" else None
    model, no_sync, zero_grad = update.model, update.session.no_sync, update.optimizer.zero_grad
    add, backward, finish = meter.add, update.backward, update.finish
    begin_step = meter.begin_step if meter.tolerates else None
    events = work.settings.events
    tells = events.has("on_backward_end")

    def run_first(step: Step, model: Any, batch: Any) -> StepOutput:
        return run_watched(work.run, update.session, update.optimizer, step, model, batch)

    def finish_first() -> bool:
        nonlocal run, finish
        run, is_made = work.run, update.finish()
        if is_made:
            finish = update.finish
            whose = f"the optimizer, {type(update.optimizer).__name__},"
            tell_of_no_gradients(parameters_of(update.optimizer), whose=whose)
        return is_made

    if is_first:
        run, finish = run_first, finish_first

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
        if tells:
            events.send("on_backward_end", loop)
        return output

    begins = True
    for batch in batches:
        if begins:
            zero_grad()
            if begin_step is not None:
                begin_step()
        begins = loop.ends_step
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
