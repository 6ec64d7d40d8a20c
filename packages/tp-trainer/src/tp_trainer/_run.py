"""One call of ``fit``: epochs, validation, schedulers, checkpoints, and where it goes on from."""

import logging
import math
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
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

from tp_trainer._checkpoint import Keeper, check_plain, collect, generators, optimizer_values, restore
from tp_trainer._fit import RunStep, Scheduler, Step, evaluate, train_epoch
from tp_trainer._interruption import Interrupted, Vigil
from tp_trainer._metrics import Meter
from tp_trainer._precision import LossScaler
from tp_trainer._progress import EpochRecord, History, Reporter, Ticker
from tp_trainer._requeue import requeue
from tp_trainer._update import Update
from tp_trainer._watchdog import Watchdog

__all__ = ["Run"]

log = logging.getLogger("tp_trainer")


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
    _epoch: int = 1
    _first: int = 0
    _resumed_meter: dict[str, Any] | None = None
    _seconds: float = 0.0
    _is_due: bool = False

    def go(self, resume: str | Path | None) -> History:
        """Train until all epochs are done, from the start or from where a checkpoint stands."""
        if self.keeper is None:
            return self._train(None)
        self._check_state()
        if resume is not None and (path := self.keeper.find(resume)) is not None:
            self._resume(path)
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
        while self._epoch <= self.epochs:
            self._train_epoch(vigil)
            self._epoch, self._first = self._epoch + 1, 0
            if self.keeper is not None:
                every = self.keeper.settings.every_epochs
                ends_some = every is not None and (self._epoch - 1) % every == 0
                if self._is_due or ends_some or self._epoch > self.epochs:
                    self._is_due = False
                    self._save(0, None)
        self.model.train(was_training)
        return History(tuple(self.records))

    def _train_epoch(self, vigil: Vigil | None) -> None:
        epoch = self._epoch
        began = time.perf_counter() - self._seconds
        meter = Meter(self.session, first_step=(epoch - 1) * self.steps + 1, tolerate=self.tolerate)
        if self._resumed_meter is not None:
            meter.load_state_dict(self._resumed_meter)
            self._resumed_meter = None
        with self.reporter.epoch(epoch, self.steps) as ticker, self.watchdog.watching():
            train_epoch(
                self.run_step,
                self.step,
                self.model,
                self.optimizer,
                self.train,
                first=self._first,
                steps=self.steps,
                accumulate=self.accumulate,
                hold=self.session.no_sync,
                meter=meter,
                update=self.update,
                scheduler=self.scheduler if self.scheduler_every == "step" else None,
                look=self._watch(ticker, meter, vigil, began),
            )
        self.update.check_parameters()
        self._seconds = 0.0
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
                self._seconds = time.perf_counter() - began
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

    def _state(self, done: int, meter: Meter | None) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the plain values of all ranks, and of this one, after ``done`` batches of the epoch."""
        session = self.session
        if meter is not None and done:
            position = self.train.state_dict(batches=done)
        else:
            position = self.train.state_dict(batches=0) | {"epoch": self.train.next_epoch, "samples": 0}
        state = {
            "epoch": self._epoch,
            "seconds": self._seconds,
            "updates": {"count": self.update.count, "skipped": self.update.skipped},
            "optimizer": optimizer_values(self.optimizer),
            "scheduler": None if self.scheduler is None else _state_of(self.scheduler),
            "scaler": None if self.scaler is None else self.scaler.state_dict(),
            "position": position,
            "records": [asdict(record) for record in self.records],
            "world_size": session.world_size,
        }
        mine = {
            "data_rank": session.data_rank,
            "generators": generators.capture(session.job.devices),
            "meter": None if meter is None or not done else meter.state_dict(),
        }
        return state, mine

    def _check_state(self) -> None:
        """Make sure that the run can be saved, before it costs anything to learn that it cannot.

        Raises:
            StateError: The model's or the scheduler's state, or the loader's position, holds what
                no checkpoint does.
        """
        collect(self.session, self.model, self.optimizer)
        check_plain("the state of the run", self._state(0, None))

    def _save(self, done: int, meter: Meter | None) -> None:
        """Save the state after ``done`` batches of the epoch that begins or runs, once for each step."""
        keeper = self.keeper
        if keeper is None or keeper.has_saved(self.update.count):
            return
        last = self.records[-1] if self.records else None
        metrics = {} if last is None else dict(last.train) | {f"val_{k}": v for k, v in last.val.items()}
        facts = {
            "step": self.update.count,
            "epoch": self._epoch,
            "backend": self.backend,
            "world_size": self.session.world_size,
            "metrics": metrics,
            "versions": _versions(),
        }
        tensors = collect(self.session, self.model, self.optimizer)
        keeper.save(self.update.count, tensors, *self._state(done, meter), facts)

    def _resume(self, path: Path) -> None:
        """Take everything from a checkpoint; the random generators last, for nothing to disturb them."""
        keeper, session = self.keeper, self.session
        if keeper is None:
            return
        tensors, state, ranks = keeper.read(path)
        restore(session, self.model, self.optimizer, state["optimizer"], tensors)
        if (self.scheduler is None) != (state["scheduler"] is None):
            has, lacks = ("the run", "the checkpoint") if self.scheduler else ("the checkpoint", "the run")
            msg = f"{path}: {has} has a scheduler and {lacks} has none; resume with what the run had"
            raise ConfigError(msg)
        if self.scheduler is not None:
            _load_state_of(self.scheduler, state["scheduler"])
        if self.scaler is not None and state["scaler"] is not None:
            self.scaler.load_state_dict(state["scaler"])
        self.update.count = state["updates"]["count"]
        self.update.skipped = state["updates"]["skipped"]
        self.records = [EpochRecord(**record) for record in state["records"]]
        self._epoch, self._seconds = state["epoch"], state["seconds"]
        self._first = self.train.load_state_dict(state["position"], replay=keeper.settings.replay)
        if self.val is not None:
            self.val.set_epoch(self._epoch - 1)
        # Ranks that share their data have each counted all of it.
        shares = {mine["data_rank"]: mine["meter"] for mine in ranks if mine["meter"] is not None}
        meters = list(shares.values())
        keeper.continues(path, self.update.count)
        if state["world_size"] == session.world_size:
            self._resumed_meter = ranks[session.rank]["meter"]
            generators.restore(ranks[session.rank]["generators"])
        else:
            # The sums of all go to one rank; whose random numbers they were cannot be kept up.
            if meters:
                self._resumed_meter = _added(meters) if session.data_rank == 0 else _nothing(meters[0])
            log.warning(
                "%s is of %d ranks, and these are %d: model, optimizer and position are those of the "
                "checkpoint, the random generators are seeded anew",
                path,
                state["world_size"],
                session.world_size,
            )
            generators.reseed(state["position"]["seed"], self.update.count, session.data_rank)
        self.reporter.say(f"resumed from {path}: epoch {self._epoch}, {self._first} batches of it done")


@cache
def _versions() -> dict[str, str]:
    return {"torch": torch.__version__, "tp-trainer": version("tp-trainer")}


def _advance(scheduler: Scheduler, loss: float) -> None:
    if isinstance(scheduler, ReduceLROnPlateau):
        scheduler.step(loss)
    else:
        scheduler.step()


def _state_of(scheduler: Any) -> Any:
    return scheduler.state_dict() if hasattr(scheduler, "state_dict") else {}


def _load_state_of(scheduler: Any, state: Any) -> None:
    if hasattr(scheduler, "load_state_dict"):
        scheduler.load_state_dict(state)


def _nothing(meter: dict[str, Any]) -> dict[str, Any]:
    return {"step": meter["step"], "samples": 0, "loss": 0.0, "others": {}}


def _added(meters: list[dict[str, Any]]) -> dict[str, Any]:
    names = {name for meter in meters for name in meter["others"]}
    return {
        "step": meters[0]["step"],
        "samples": sum(meter["samples"] for meter in meters),
        "loss": math.fsum(meter["loss"] for meter in meters),
        "others": {n: math.fsum(meter["others"].get(n, 0.0) for meter in meters) for n in names},
    }
