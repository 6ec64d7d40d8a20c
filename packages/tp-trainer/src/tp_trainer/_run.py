"""One call of ``fit``: epochs, validation, schedulers, checkpoints."""

import math
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau
from tp_core import PreparedLoader, Session
from tp_core.errors import ConfigError

from tp_trainer._checkpoint import Keeper, collect, to_json
from tp_trainer._fit import RunStep, Scheduler, Step, evaluate, train_epoch
from tp_trainer._interruption import Interrupted, Vigil
from tp_trainer._metrics import Meter
from tp_trainer._precision import LossScaler
from tp_trainer._progress import EpochRecord, History, Reporter, Ticker
from tp_trainer._requeue import requeue
from tp_trainer._run_state import capture, resume_run
from tp_trainer._update import Update
from tp_trainer._watchdog import Watchdog

__all__ = ["Run"]


@dataclass(slots=True, kw_only=True)
class Run:
    """One call of ``fit``, with everything prepared.

    Attributes:
        session: Where the steps run.
        backend: The name of its backend.
        run_step: Runs a step in the precision that was asked for.
        step: The user's step.
        val_step: The step for validation.
        model: The prepared model.
        optimizer: The prepared optimizer.
        scheduler: Moves the learning rate, or ``None``.
        scheduler_every: Whether it moves every "step" or every "epoch".
        train: The prepared loader.
        val: The prepared loader of the validation, or ``None``.
        epochs: How many epochs there are.
        steps: How many batches make an epoch.
        accumulate: How many batches make an optimizer step.
        tolerate: Whether losses that are not finite are left out, and do not end the run.
        update: Makes the optimizer steps.
        scaler: Scales the loss, or ``None``.
        reporter: Shows how far it is.
        keeper: Writes checkpoints, or ``None``.
        watchdog: Ends a run of which no step ends.
        after_epoch: Called after every epoch.
        records: What the epochs came to so far.
        epoch: The one that runs, or is the next, from 1.
        first: How many batches of it were done before this call.
        seconds: How long they took.
        meter_state: What they came to; ``None`` where there are none.
    """

    session: Session
    backend: str
    run_step: RunStep
    step: Step
    val_step: Step
    model: nn.Module
    optimizer: Optimizer
    scheduler: Scheduler | None
    scheduler_every: str
    train: PreparedLoader
    val: PreparedLoader | None
    epochs: int
    steps: int
    accumulate: int
    tolerate: bool
    update: Update
    scaler: LossScaler | None
    reporter: Reporter
    keeper: Keeper | None
    watchdog: Watchdog
    after_epoch: Callable[[], None]
    records: list[EpochRecord] = field(default_factory=list)
    epoch: int = 1
    first: int = 0
    meter_state: dict[str, Any] | None = None
    seconds: float = 0.0
    _is_due: bool = False

    def go(self, resume: str | Path | None) -> History:
        """Train until all epochs are done, from the start or from where a checkpoint stands."""
        if self.keeper is None:
            return self._train(None)
        self._check_state()
        self.keeper.try_folder()
        if resume is not None and (path := self.keeper.find(resume)) is not None:
            resume_run(self, self.keeper, path)
        if resume != "auto":
            self.keeper.check_free(self.update.count)
        with Vigil(self.session) as vigil:
            try:
                history = self._train(vigil)
            except Exception:
                self.keeper.abandon()  # or its thread and another run would write in one place
                raise
            self.keeper.finish()
        return history

    def _train(self, vigil: Vigil | None) -> History:
        was_training = self.model.training
        self.model.train()
        while self.epoch <= self.epochs:
            self._train_epoch(vigil)
            self.epoch, self.first = self.epoch + 1, 0
            if self.keeper is not None:
                every = self.keeper.settings.every_epochs
                ends_some = every is not None and (self.epoch - 1) % every == 0
                if self._is_due or ends_some or self.epoch > self.epochs:
                    self._is_due = False
                    self._save(0, None)
                self._check_best(self.keeper.settings.best)
        self.model.train(was_training)
        return History(tuple(self.records))

    def _train_epoch(self, vigil: Vigil | None) -> None:
        epoch = self.epoch
        began = time.perf_counter() - self.seconds
        meter = Meter(self.session, first_step=(epoch - 1) * self.steps + 1, tolerate=self.tolerate)
        if self.meter_state is not None:
            meter.load_state_dict(self.meter_state)
            self.meter_state = None
        with self.reporter.epoch(epoch, self.steps) as ticker, self.watchdog.watching():
            train_epoch(
                self.run_step,
                self.step,
                self.model,
                self.optimizer,
                self.train,
                first=self.first,
                steps=self.steps,
                accumulate=self.accumulate,
                hold=self.session.no_sync,
                meter=meter,
                update=self.update,
                scheduler=self.scheduler if self.scheduler_every == "step" else None,
                look=self._watch(ticker, meter, vigil, began),
            )
        self.update.check_parameters()
        self.seconds = 0.0
        seconds = time.perf_counter() - began
        rate = float(self.optimizer.param_groups[0]["lr"])
        train, val = meter.means(), {}
        if self.val is not None:
            with self.watchdog.watching():
                val = evaluate(self.session, self.run_step, self.val_step, self.model, self.val)
        if self.scheduler is not None and self.scheduler_every == "epoch":
            _advance(self.scheduler, (val or train).get("loss", math.nan))
        record = EpochRecord(epoch, self.update.count, meter.samples, seconds, rate, train, val)
        self.records.append(record)
        self.reporter.done(record)
        self.after_epoch()

    # -- between two steps ----------------------------------------------------------------------

    def _watch(
        self, ticker: Ticker, meter: Meter, vigil: Vigil | None, began: float
    ) -> Callable[[int], float]:
        """Return what looks, between two optimizer steps, at the progress, the clock and the signals."""
        keeper = self.keeper
        ask_at = 0.0

        def batch_after(done: int, steps: int) -> float:
            """Return how many batches are done when ``steps`` more optimizer steps are."""
            return (done // self.accumulate + steps) * self.accumulate

        def look(done: int) -> float:
            nonlocal ask_at
            if done >= ticker.next_look and done:
                ticker.look(done, meter.last_loss)
            if keeper is None or vigil is None:
                return ticker.next_look
            signalled, is_due = 0, keeper.is_due(self.update.count)
            if done >= ask_at:
                signalled, is_old = vigil.ask(due=keeper.is_old)
                is_due = is_due or (is_old and done > 0)
                ask_at = min(batch_after(done, vigil.interval), self.steps)
            if is_due and done == self.steps and not signalled:
                # After the validation, whose outcome may decide which checkpoint is the best.
                self._is_due = True
            elif is_due or signalled:
                self.seconds = time.perf_counter() - began
                self.update.check_parameters()
                with self.watchdog.paused():
                    self._save(done, meter)
            if signalled:
                keeper.finish()
                name = signal.Signals(signalled).name
                self.reporter.say(f"{name}: ended after step {self.update.count}, saved: {keeper.last}")
                if signalled == signal.SIGUSR1 and self.session.is_main:
                    requeue()
                raise Interrupted(signalled, keeper.last)
            left = keeper.steps_left(self.update.count)
            save_at = math.inf if left is None else min(batch_after(done, left), self.steps)
            return min(ticker.next_look, ask_at if ask_at > done else math.inf, save_at)

        return look

    # -- checkpoints ----------------------------------------------------------------------------

    def _check_state(self) -> None:
        """Make sure that the run can be saved, before it costs anything to learn that it cannot.

        Raises:
            StateError: The model's or the scheduler's state, or the loader's position, holds what
                no checkpoint does.
        """
        collect(self.session, self.model, self.optimizer)
        to_json("the state of the run", capture(self, 0, None))

    def _check_best(self, name: str | None) -> None:
        """Make sure that the metric which decides over checkpoints is there.

        Raises:
            ConfigError: It is none of those of the last epoch.
        """
        last = self.records[-1]
        known = [*last.train, *(f"val_{key}" for key in last.val)]
        if name is not None and name not in known:
            msg = f"best={name!r} is none of the metrics of the run, which are {', '.join(known)}"
            raise ConfigError(msg)

    def _save(self, done: int, meter: Meter | None) -> None:
        """Save the state after ``done`` batches of the epoch that begins or runs, once for each step."""
        keeper = self.keeper
        if keeper is None or keeper.has_saved(self.update.count):
            return
        last = self.records[-1] if self.records else None
        metrics = {} if last is None else dict(last.train) | {f"val_{k}": v for k, v in last.val.items()}
        facts = {
            "step": self.update.count,
            "epoch": self.epoch,
            "backend": self.backend,
            "world_size": self.session.world_size,
            "metrics": metrics,
            "versions": _versions(),
        }
        tensors = collect(self.session, self.model, self.optimizer)
        keeper.save(self.update.count, tensors, *capture(self, done, meter), facts)


@cache
def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "tp-trainer": version("tp-trainer")}


def _advance(scheduler: Scheduler, loss: float) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()
