"""One call of ``fit``: from its settings over the prepared objects to the steps, on top of the loop."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tp_core.data import CountedBatch, Parts, PreparedLoader, StepOutput
from tp_core.plugins import RunView, Session

from tp_trainer._checks import check_no_others, check_owner
from tp_trainer._memory import StepParts
from tp_trainer._metrics import (
    Evaluator,
    check_scheduler_metric,
    metric_for_scheduler,
    scheduler_metric,
    without_metrics,
)
from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._preparation import Preparation
from tp_trainer._running._build import build_loop
from tp_trainer._running._fastest import choose_fastest
from tp_trainer._running._history import History
from tp_trainer._running._log import plan_log
from tp_trainer._running._loop import Loop, LoopHooks
from tp_trainer._running._settings import FitSettings
from tp_trainer._running._step_events import OptimizerStepEvent
from tp_trainer._running._watchdog import Watchdog, watchdog_of
from tp_trainer._steps._mistakes import explain_mistake
from tp_trainer._steps._optimizer_step import OptimizerStep
from tp_trainer._steps._step import (
    RunStep,
    Step,
    is_inherited,
    loss_of,
    parameters_of,
    restore_modes,
    run_watched,
    switch_weights,
    warn_no_gradients,
    weighed,
)
from tp_trainer._steps._step_state import StepStateWatch


class FitHooks(LoopHooks):
    """The hooks of ``fit``: validation, checks of parameters, and the ends of epochs."""

    counts_batches = False
    weighs_batches = False  # whether batches have weights of their own; their check has passed then
    optimizer_step: OptimizerStep

    def __init__(
        self,
        settings: FitSettings,
        optimizer_step: OptimizerStep,
        run: RunStep,
        evaluator: Evaluator,
        train: PreparedLoader,
        while_open: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self.settings, self.optimizer_step, self.run = settings, optimizer_step, run
        self._while_open = while_open
        self._evaluator, self.train = evaluator, train
        self.step_state = StepStateWatch(optimizer_step.session)
        self.skips_nonfinite = settings.gradients.nonfinite == "skip"

    def while_open(self, loop: RunView) -> AbstractContextManager[None]:  # noqa: ARG002 - contract
        return self._while_open()

    def validate(self, boundaries: StepBoundaries | None, max_batches: int | None) -> Mapping[str, float]:
        """Evaluate the model on the validation's loaders.

        Collectives: as in `Evaluator.evaluate`.
        """
        return self._evaluate(self._evaluator, boundaries, max_batches)

    def validation_names(self, wanted: set[str]) -> set[str] | None:
        """Return the names of the validation's results, after its step on a batch if that is needed.

        Collectives: as in `Evaluator.evaluate`, unless the loss and the metrics are all that is wanted.
        """
        evaluator = self._evaluator
        if not evaluator.loaders:
            return {"loss"}
        own = {f"val_{prefix}{name}" for prefix in evaluator.loaders for name in evaluator.metrics}
        if wanted <= own | {f"val_{prefix}loss" for prefix in evaluator.loaders}:
            return wanted
        if any(isinstance(loader, Iterator) for loader in self.settings.val_loaders().values()):
            return None  # it is gone through once
        # Without the metrics: some need more than the samples of a batch.
        step = without_metrics(evaluator.step, evaluator.metrics)
        names = self._evaluate(replace(evaluator, step=_counted(step), metrics={}), None, 1)
        return own | {f"val_{name}" for name in names if not name.endswith(_COUNTED)}

    def _evaluate(
        self, evaluator: Evaluator, boundaries: StepBoundaries | None, max_batches: int | None
    ) -> Mapping[str, float]:
        session, model = self.optimizer_step.session, self.optimizer_step.model
        epoch = max(self.train.next_epoch - 1, 0)
        optimizer = self.optimizer_step.optimizer
        switch_weights(optimizer, training=False)
        try:
            return evaluator.evaluate(session, model, epoch=epoch, boundaries=boundaries, most=max_batches)
        finally:
            switch_weights(optimizer, training=True)

    def check_parameters(self) -> None:
        """Raise if the last step has made a parameter NaN or infinite.

        Collectives: as in `OptimizerStep.check_parameters`.
        """
        self.optimizer_step.check_parameters()

    def step_schedulers(self, train: Mapping[str, float], val: Mapping[str, float]) -> None:
        options = self.settings.scheduler
        if options is None or options.every != "epoch":
            return
        if isinstance(options.scheduler, ReduceLROnPlateau):
            metric = metric_for_scheduler(options.monitor, train, val, validates=bool(val))
            options.scheduler.step(metric)
        else:
            options.scheduler.step()

    def metric_checks(self) -> dict[str, Callable[[Iterable[str]], None]]:
        """Return the check of the metric that the scheduler looks at, if it looks at one."""
        options = self.settings.scheduler
        if options is None or not isinstance(options.scheduler, ReduceLROnPlateau):
            return {}
        name = scheduler_metric(options.monitor, validates=bool(self._evaluator.loaders))
        return {name: partial(check_scheduler_metric, name)}

    def facts(self) -> dict[str, object]:
        return self.settings.facts()


_COUNTED = "tp:counted"


def _counted(step: Step) -> Step:
    """Return a step that has a number for each batch, as one with metrics alone has none."""

    def run(model: Any, batch: Any) -> StepOutput:
        output = step(model, batch)
        named = {"loss": output} if isinstance(output, Tensor) else output
        if isinstance(named, Mapping):
            return {**named, _COUNTED: 0.0}
        return output

    run.wrapped_step = step  # type: ignore[attr-defined]  # functions take any
    return run


def fit(preparation: Preparation, settings: FitSettings, model: nn.Module, optimizer: Optimizer) -> History:
    """Train a model, in place: open the session, prepare the objects, build the loop, and run it.

    Collectives: as in `build_loop` and `_train`.
    """
    settings.loop.events.send("on_setup", model, optimizer)
    work = StepParts(optimizer, settings.train_loader, settings.step)
    if preparation.make_trial is not None:
        choose_fastest(preparation, preparation.make_trial, model, optimizer, work)
    session = preparation.open(model, by="fit()", work=work)
    logs = plan_log(preparation, settings.loop, [optimizer])
    check_owner(optimizer, [model])
    if session.world_size > 1:
        check_no_others(optimizer, model, "its gradients would differ between the ranks")
    if settings.loop.checkpoint is not None:
        check_no_others(optimizer, model, "its value would be in no checkpoint")

    model = preparation.prepare_model(model)
    optimizer = session.prepare_optimizer(optimizer)
    train = preparation.prepare_loader(settings.train_loader)
    optimizer_step = OptimizerStep(
        session,
        model,
        optimizer,
        settings.gradients,
        accumulate=session.job.accumulate,
        scaler=preparation.scaler,
    )
    watchdog = watchdog_of(session.job.environment, settings.loop.limits.step_timeout_s)
    evaluator = Evaluator(
        run=partial(_run_evaluated, preparation, watchdog),
        step=settings.val_step(),
        loaders=preparation.prepare_named(settings.val_loaders()),
        metrics=settings.val_metrics(),
    )
    run = preparation.run_step(train)
    hooks = FitHooks(settings, optimizer_step, run, evaluator, train, preparation.noting_draws)
    if settings.scheduler is None:
        schedulers = {}
    else:
        schedulers = {"scheduler": settings.scheduler.scheduler}
    with preparation.continued(settings.train_loader, train):
        loop = build_loop(
            preparation,
            settings.loop,
            train,
            hooks=hooks,
            watchdog=watchdog,
            logs=logs,
            models={"model": model},
            optimizers={"optimizer": optimizer},
            schedulers=schedulers,
        )
        return _train(loop, hooks)


def _run_evaluated(preparation: Preparation, watchdog: Watchdog | None, batches: PreparedLoader) -> RunStep:
    """Return what runs the step on the batches of a validation; each counts as a step for the watchdog."""
    run = preparation.run_step(batches)
    if watchdog is None:
        return run
    return watchdog.watch(run)


def _train(loop: Loop, hooks: FitHooks) -> History:
    """Train until the loop has no batch left."""
    model, events = hooks.optimizer_step.model, hooks.settings.loop.events
    if events.has("on_optimizer_step"):
        event = OptimizerStepEvent(hooks.optimizer_step.session, events)
        hooks.optimizer_step.send_norm_to(partial(event.send, loop))
    optimizer = hooks.optimizer_step.optimizer
    with restore_modes(model):
        model.train()  # before on_fit_start, in which a callback may set a frozen module to eval mode
        switch_weights(optimizer, training=True)
        with loop:
            for number, batches in enumerate(loop.by_epoch()):
                _train_epoch(loop, batches, hooks, is_first=not number)
        switch_weights(optimizer, training=False)
    return loop.history


def _train_epoch(loop: Loop, batches: Iterator[Any], hooks: FitHooks, *, is_first: bool) -> None:
    """Train on the batches of an epoch.

    This is the hot path: attributes are bound to locals, and checks run in the first step alone.
    """
    settings, run, update, meter = hooks.settings, hooks.run, hooks.optimizer_step, loop.meter
    metrics, options = settings.val_metrics(), settings.scheduler
    if metrics:
        step = without_metrics(settings.step, metrics)
    else:
        step = settings.step
    step = weighed(step) if hooks.weighs_batches else step
    if options is not None and options.every == "step":
        scheduler = options.scheduler
    else:
        scheduler = None
    model, no_sync, zero_grad = update.model, update.session.no_sync, update.optimizer.zero_grad
    add, backward, finish = meter.add, update.backward, update.finish
    begin_step = meter.begin_step if meter.tolerates else None
    events = settings.loop.events
    sends_backward_end = events.has("on_backward_end")
    position = loop._position  # `loop.ends_step` would be a call for each batch
    # On one device in fp32 both add a call to each step, and nothing else.
    is_plain = is_inherited(hooks.run, Session.run)
    calls_step, calls_backward = False, is_inherited(backward, Session.backward)

    def run_first(_: Step, model: Any, batch: Any) -> StepOutput:
        nonlocal step
        # Iterating parts as a tuple: users' code that unpacks them is refused.
        if isinstance(batch, Parts):
            parts = [*tuple.__iter__(batch)]
        else:
            parts = [batch]
        if not hooks.weighs_batches and any(isinstance(p, CountedBatch) for p in parts):
            hooks.weighs_batches, step = True, weighed(step, [step])
        moved = None if options is None else options.scheduler
        watched = partial(run_watched, hooks.run, update.optimizer, moved)
        output = hooks.step_state.run(
            lambda counted: watched(counted, model, batch), step, [model], own=settings.step
        )
        if isinstance(output, Mapping):
            metrics = {"loss", *output}
        else:
            metrics = {"loss"}
        loop._check_training_metrics(metrics)
        return output

    def run_first_of_epoch(_: Step, model: Any, batch: Any) -> StepOutput:
        nonlocal run, calls_step
        run, calls_step = hooks.run, is_plain
        return hooks.step_state.run(
            lambda counted: hooks.run(counted, model, batch), step, [model], own=settings.step
        )

    def finish_first() -> bool:
        nonlocal run, finish, calls_step
        run, calls_step, is_made = hooks.run, is_plain, update.finish()
        if is_made:
            finish = update.finish
            owner = f"the optimizer, {type(update.optimizer).__name__},"
            warn_no_gradients(parameters_of(update.optimizer), owner=owner)
        return is_made

    if is_first:
        run, finish = run_first, finish_first
    elif hooks.step_state.looks:  # again: a step may begin to count later
        run = run_first_of_epoch
    else:
        calls_step = is_plain

    def learn(batch: Any) -> StepOutput:
        share = position.share
        if calls_step:
            output = step(model, batch)
        else:
            output = run(step, model, batch)
        # Most steps return a scalar: the full check of `loss_of` would double the cost of this function.
        if type(output) is Tensor and output.requires_grad and not output.dim():
            loss = output
        else:
            loss = loss_of(output, training=True)
        weight = add(loss, output, share)
        if calls_backward and weight is None:
            loss.backward()
        elif weight is None:
            backward(loss, share)
        else:
            update.weighted_backward(loss, weight)
        if sends_backward_end:
            events.send("on_backward_end", loop)
        return output

    begins = True
    batch: Any = ()
    try:
        for batch in batches:
            if begins:
                zero_grad()
                if begin_step is not None:
                    begin_step()
            begins = position.ends_step
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
    except Exception as error:
        explain_mistake(error, batch)
        raise
