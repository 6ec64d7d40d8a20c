"""One call of ``fit``: the steps of one model and one optimizer, on top of the loop."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Protocol

from torch import Tensor
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tp_core.plugins import PreparedLoader, StepOutput

from tp_trainer._metrics._evaluation import Validation, metric_for_scheduler
from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._running._history import History
from tp_trainer._running._loop import Loop, LoopHooks
from tp_trainer._running._settings import FitSettings
from tp_trainer._steps._optimizer_step import OptimizerStep
from tp_trainer._steps._step import (
    RunStep,
    Step,
    loss_of,
    parameters_of,
    restore_modes,
    run_watched,
    warn_no_gradients,
)


class Scheduler(Protocol):
    """A learning-rate scheduler: the one method that the loop needs."""

    def step(self) -> None:
        """Set the next learning rate."""


class FitHooks(LoopHooks):
    """The hooks of ``fit``: validation, checks of parameters, and the ends of epochs.

    Args:
        settings: The arguments of the call.
        optimizer_step: Makes the optimizer steps.
        run: Runs the user's step on the session's devices.
        validation: The validation of the run, or ``None``.
        train: The prepared loader.
        after_epoch: Called after every epoch.
    """

    counts_batches = False

    def __init__(
        self,
        settings: FitSettings,
        optimizer_step: OptimizerStep,
        run: RunStep,
        validation: Validation | None,
        *,
        train: PreparedLoader,
        after_epoch: Callable[[], None],
    ) -> None:
        self.settings, self.optimizer_step, self.run = settings, optimizer_step, run
        self._validation, self.train, self._after_epoch = validation, train, after_epoch
        self.validates = validation is not None
        self.skips_nonfinite = settings.gradients.nonfinite == "skip"

    def validate(self, boundaries: StepBoundaries | None, max_batches: int | None) -> Mapping[str, float]:
        """Evaluate the model on the validation's loaders.

        Collectives: as in `Validation.evaluate`.
        """
        if self._validation is None:
            return {}
        session, model = self.optimizer_step.session, self.optimizer_step.model
        epoch = max(self.train.next_epoch - 1, 0)
        return self._validation.evaluate(session, model, epoch=epoch, boundaries=boundaries, most=max_batches)

    def check_parameters(self) -> None:
        """Raise if the last step has made a parameter NaN or infinite.

        Collectives: as in `OptimizerStep.check_parameters`.
        """
        self.optimizer_step.check_parameters()

    def step_schedulers(self, train: Mapping[str, float], val: Mapping[str, float]) -> None:
        """Step the scheduler, if it steps once per epoch."""
        scheduler = self.settings.scheduler
        if scheduler is None or self.settings.scheduler_every != "epoch":
            return
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(metric_for_scheduler(self.settings.monitor, train, val, validates=bool(val)))
        else:
            scheduler.step()

    def after_epoch(self) -> None:
        """Write ``save_to``, if it is given."""
        self._after_epoch()


def train(loop: Loop, hooks: FitHooks) -> History:
    """Train until the loop has no batch left.

    Raises:
        StepError: The step returned no usable loss.
        NonFiniteLossError: The loss or the gradients are NaN or infinite.
        LoaderError: The loader ended before the last batch of the epoch.
    """
    model, events = hooks.optimizer_step.model, hooks.settings.events
    if events.has("on_optimizer_step"):
        hooks.optimizer_step.send_norm_to(lambda norm: events.send("on_optimizer_step", loop, norm))
    with restore_modes(model):
        model.train()  # before on_fit_start, in which a callback may set a frozen module to eval mode
        with loop:
            for number, batches in enumerate(loop.by_epoch()):
                _train_epoch(loop, batches, hooks, is_first=not number)
    return loop.history


def _train_epoch(loop: Loop, batches: Iterator[Any], hooks: FitHooks, *, is_first: bool) -> None:
    """Train on the batches of an epoch.

    This is the hot path: attributes are bound to locals, and checks run in the first step alone.
    """
    run, step, update, meter = hooks.run, hooks.settings.training_step(), hooks.optimizer_step, loop.meter
    scheduler = hooks.settings.scheduler if hooks.settings.scheduler_every == "step" else None
    model, no_sync, zero_grad = update.model, update.session.no_sync, update.optimizer.zero_grad
    add, backward, finish = meter.add, update.backward, update.finish
    loader = hooks.train
    begin_step = meter.begin_step if meter.tolerates else None
    events = hooks.settings.events
    sends_backward_end = events.has("on_backward_end")

    def run_first(step: Step, model: Any, batch: Any) -> StepOutput:
        return run_watched(hooks.run, update.session, update.optimizer, step, model, batch)

    def finish_first() -> bool:
        nonlocal run, finish
        run, is_made = hooks.run, update.finish()
        if is_made:
            finish = update.finish
            owner = f"the optimizer, {type(update.optimizer).__name__},"
            warn_no_gradients(parameters_of(update.optimizer), owner=owner)
        return is_made

    if is_first:
        run, finish = run_first, finish_first

    def learn(batch: Any) -> StepOutput:
        share = loader.share  # now: the step may iterate the loader, too
        output = run(step, model, batch)
        # Most steps return a scalar: the full check of `loss_of` would double the cost of this function.
        if type(output) is Tensor and output.requires_grad and not output.dim():
            loss = output
        else:
            loss = loss_of(output, training=True)
        weight = add(loss, output, share)
        if weight is None:
            backward(loss, share)
        else:
            update.weighted_backward(loss, weight)
        if sends_backward_end:
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
        # Kept until the next step: freeing the graph before the optimizer step takes longer.
        output = learn(batch)  # noqa: F841
        if not finish():
            if not update.is_empty:
                meter.forget_step()
        elif scheduler is not None:
            scheduler.step()
