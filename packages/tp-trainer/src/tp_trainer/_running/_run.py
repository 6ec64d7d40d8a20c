"""One call of ``fit``: epochs, validation, schedulers, checkpoints."""

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from pathlib import Path

import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tp_core.errors import ConfigError
from tp_core.plugins import PreparedLoader, Session

from tp_trainer._checkpoint import Checkpointer
from tp_trainer._checks._values import check_positive
from tp_trainer._metrics._evaluation import evaluate
from tp_trainer._opening._agreement import check_same
from tp_trainer._running._loop import Scheduler, TrainingLoop
from tp_trainer._running._progress import EpochRecord, History, Reporter, Ticker
from tp_trainer._running._settings import FitSettings
from tp_trainer._running._signals import SignalWatch, interrupted, requeue
from tp_trainer._running._state import RunState
from tp_trainer._running._watchdog import Watchdog
from tp_trainer._steps._meter import Meter
from tp_trainer._steps._optimizer_step import OptimizerStep
from tp_trainer._steps._precision import RunStep

__all__ = ["Run", "prepare_run"]


@dataclass(slots=True, kw_only=True)
class Run:
    """One call of ``fit``, with everything prepared.

    Attributes:
        settings: The arguments of the call.
        backend: The name of the backend.
        loop: Trains on the batches of an epoch.
        train: The prepared loader.
        val: The prepared loader of the validation, or ``None``.
        state: How far the run is, and what checkpoints save of it.
        reporter: Shows how far it is.
        checkpointer: Writes checkpoints, or ``None``.
        watchdog: Aborts a run whose step takes too long.
        after_epoch: Called after every epoch.
    """

    settings: FitSettings
    backend: str
    loop: TrainingLoop
    train: PreparedLoader
    val: PreparedLoader | None
    state: RunState
    reporter: Reporter
    checkpointer: Checkpointer | None
    watchdog: Watchdog
    after_epoch: Callable[[], None]
    _is_due: bool = False

    @property
    def _step(self) -> OptimizerStep:
        return self.loop.optimizer_step

    @property
    def _session(self) -> Session:
        return self.loop.optimizer_step.session

    def go(self) -> History:
        """Train until all epochs are done, from the start or from where a checkpoint stands."""
        checkpointer, resume = self.checkpointer, self.settings.resume_from()
        if checkpointer is None:
            return self._train(None)
        self.state.check()
        checkpointer.open()
        try:
            if resume is not None and (path := checkpointer.find(resume)) is not None:
                self._resume(checkpointer, path)
            if resume != "auto":
                checkpointer.check_free(self._step.count)
            with SignalWatch(self._session) as signals:
                history = self._train(signals)
                checkpointer.finish()
            return history
        finally:
            checkpointer.close()

    def _resume(self, checkpointer: Checkpointer, path: Path) -> None:
        state = self.state
        state.restore(path, checkpointer.read(path), replay=checkpointer.settings.replay)
        checkpointer.continues(path, self._step.count)
        self.reporter.say(f"resumed from {path}: epoch {state.epoch}, {state.first} batches of it done")

    def _train(self, signals: SignalWatch | None) -> History:
        state, model = self.state, self._step.model
        was_training = model.training
        model.train()
        while state.epoch <= self.settings.epochs:
            self._train_epoch(signals)
            state.epoch, state.first = state.epoch + 1, 0
            if self.checkpointer is not None:
                every = self.checkpointer.settings.every_epochs
                ends_some = every is not None and (state.epoch - 1) % every == 0
                if self._is_due or ends_some or state.epoch > self.settings.epochs:
                    self._is_due = False
                    self._save(0, None)
                self._check_best(self.checkpointer.settings.best)
        model.train(was_training)
        return History(tuple(state.records))

    def _train_epoch(self, signals: SignalWatch | None) -> None:
        state, settings = self.state, self.settings
        epoch = state.epoch
        began = time.perf_counter() - state.seconds
        meter = Meter(
            self._session,
            first_step=(epoch - 1) * self.loop.steps + 1,
            tolerate=settings.gradients.nonfinite == "skip",
            weighs=state.weighs,
        )
        if state.meter_state is not None:
            meter.load_state_dict(state.meter_state)
            state.meter_state = None
        with self.reporter.epoch(epoch, self.loop.steps) as ticker, self.watchdog.watching():
            on_step = self._on_step(ticker, meter, signals, began)
            self.loop.train_epoch(self.train, first=state.first, meter=meter, on_step=on_step)
        self._step.check_parameters()
        state.weighs = meter.weighs
        state.seconds = 0.0
        seconds = time.perf_counter() - began
        rate = float(self._step.optimizer.param_groups[0]["lr"])
        train, val = meter.means(), self._validate()
        if settings.scheduler is not None and settings.scheduler_every == "epoch":
            _advance(settings.scheduler, (val or train).get("loss", math.nan))
        record = EpochRecord(epoch, self._step.count, meter.samples, seconds, rate, train, val)
        state.records.append(record)
        self.reporter.done(record)
        self.after_epoch()

    def _validate(self) -> dict[str, float]:
        """Return the means over the samples of the validation; none without one."""
        if self.val is None:
            return {}
        self.val.set_epoch(self.train.next_epoch - 1)
        step = self.settings.val_step or self.settings.step
        with self.watchdog.watching():
            return evaluate(self._session, self.loop.run, step, self._step.model, self.val)

    # -- between two steps ----------------------------------------------------------------------

    def _on_step(
        self, ticker: Ticker, meter: Meter, signals: SignalWatch | None, began: float
    ) -> Callable[[int], float]:
        """Return what looks, between two optimizer steps, at the progress, the clock and the signals."""
        checkpointer, step, steps = self.checkpointer, self._step, self.loop.steps
        ask_at = 0.0

        def batch_after(done: int, more: int) -> float:
            """Return how many batches are done when ``more`` further optimizer steps are."""
            return (done // step.accumulate + more) * step.accumulate

        def on_step(done: int) -> float:
            nonlocal ask_at
            if done >= ticker.next_update and done:
                ticker.update(done, meter.last_loss)
            if checkpointer is None or signals is None:
                return ticker.next_update
            signalled, is_due = 0, checkpointer.is_due(step.count)
            if done >= ask_at:
                signalled, is_old = signals.ask(due=checkpointer.is_old)
                is_due = is_due or (is_old and done > 0)
                ask_at = min(batch_after(done, signals.interval), steps)
            if is_due and done == steps and not signalled:
                # After the validation, whose outcome may decide which checkpoint is the best.
                self._is_due = True
            elif is_due or signalled:
                self.state.seconds = time.perf_counter() - began
                step.check_parameters()
                with self.watchdog.paused():
                    self._save(done, meter)
            if signalled:
                checkpointer.finish()
                end = interrupted(signalled, self._session, step=step.count, saved=checkpointer.last)
                if signalled == signal.SIGUSR1 and self._session.is_main:
                    requeue()
                raise end
            left = checkpointer.steps_left(step.count)
            save_at = math.inf if left is None else min(batch_after(done, left), steps)
            return min(ticker.next_update, ask_at if ask_at > done else math.inf, save_at)

        return on_step

    # -- checkpoints ----------------------------------------------------------------------------

    def _check_best(self, name: str | None) -> None:
        """Make sure that the metric which decides over checkpoints is there.

        Raises:
            ConfigError: No metric of the last epoch has that name.
        """
        last = self.state.records[-1]
        known = [*last.train, *(f"val_{key}" for key in last.val)]
        if name is not None and name not in known:
            msg = f"best={name!r} is none of the metrics of the run, which are {', '.join(known)}"
            raise ConfigError(msg)

    def _save(self, done: int, meter: Meter | None) -> None:
        """Save the state after ``done`` batches of the epoch that begins or runs, once for each step."""
        checkpointer = self.checkpointer
        if checkpointer is None or checkpointer.has_saved(self._step.count):
            return
        last = self.state.records[-1] if self.state.records else None
        metrics = {} if last is None else dict(last.train) | {f"val_{k}": v for k, v in last.val.items()}
        facts = {
            "step": self._step.count,
            "epoch": self.state.epoch,
            "backend": self.backend,
            "world_size": self._session.world_size,
            "metrics": metrics,
            "versions": _versions(),
        }
        checkpointer.save(self._step.count, self.state.tensors(), *self.state.capture(done, meter), facts)


def prepare_run(
    settings: FitSettings,
    optimizer_step: OptimizerStep,
    *,
    train: PreparedLoader,
    val: PreparedLoader | None,
    run_step: RunStep,
    backend: str,
    progress: bool,
    after_epoch: Callable[[], None],
) -> Run:
    """Return a run that is ready to go, once all ranks have been found to mean the same.

    Args:
        settings: The arguments of the call of ``fit``.
        optimizer_step: Makes the optimizer steps.
        train: The prepared loader.
        val: The prepared loader of the validation, or ``None``.
        run_step: Runs a step in the precision that was asked for.
        backend: The name of the backend.
        progress: Whether rank 0 shows how far the run is.
        after_epoch: Called after every epoch.

    Raises:
        ConfigError: An epoch has no batches.
        DisagreementError: The ranks were given different arguments.
        LoaderError: The loader has no length.

    Collectives: one gather of objects.
    """
    session, checkpoints = optimizer_step.session, settings.checkpoints()
    steps = len(train) if settings.steps_per_epoch is None else settings.steps_per_epoch
    check_positive("the number of batches in the loader", steps)
    check_same(session, settings.facts(steps))
    watchdog = Watchdog(session.job.environment, settings.step_timeout_s)
    loop = TrainingLoop(
        run=watchdog.watch(run_step),
        step=settings.step,
        optimizer_step=optimizer_step,
        scheduler=settings.scheduler if settings.scheduler_every == "step" else None,
        steps=steps,
    )
    return Run(
        settings=settings,
        backend=backend,
        loop=loop,
        train=train,
        val=val,
        state=RunState(optimizer_step, train, settings.scheduler),
        reporter=Reporter(enabled=progress and session.is_main, epochs=settings.epochs),
        checkpointer=None if checkpoints is None else Checkpointer(checkpoints, session),
        watchdog=watchdog,
        after_epoch=after_epoch,
    )


@cache
def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "tp-trainer": version("tp-trainer")}


def _advance(scheduler: Scheduler, loss: float) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()
