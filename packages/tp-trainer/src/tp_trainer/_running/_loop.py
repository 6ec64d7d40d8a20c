"""The loop over batches under every run: between two batches it does all that a run needs."""

import logging
import math
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from tp_core.errors import ConfigError, LoaderError
from tp_core.plugins import PreparedLoader, RunStatus, RunView, Session

from tp_trainer._checkpoint import _generators as generators
from tp_trainer._checks import check_positive
from tp_trainer._metrics._metric import GatherInterruptedError
from tp_trainer._opening._agreement import check_same, check_same_optimizers
from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._running._history import EpochRecord, History
from tp_trainer._running._log import RunLog
from tp_trainer._running._progress import Reporter, Ticker
from tp_trainer._running._saving import Saving
from tp_trainer._running._settings import Limits, LoopSettings
from tp_trainer._running._signals import Decision, Interrupted, SignalWatch, interrupted
from tp_trainer._running._state import RunState, Trained
from tp_trainer._running._user_state import UserState, unsaved_averages, unsaved_optimizers
from tp_trainer._running._watchdog import Watchdog
from tp_trainer._steps._meter import Meter
from tp_trainer._steps._optimizer_step import OptimizerStep
from tp_trainer._steps._step import LossScaler, guard_stop_iteration

log = logging.getLogger("tp_trainer")

LOG_STATE = "run:loggers"
"""The name under which checkpoints have the state of loggers; no callback can have it."""

T = TypeVar("T")


class LoopHooks:
    """What the owner of a loop adds to it: here nothing, as for a loop without validation.

    Attributes:
        validates: Whether :meth:`validate` has anything to validate on.
        counts_batches: Whether the loop counts batches and samples: where it does not see their losses.
        skips_nonfinite: Whether steps whose loss is not finite are left out of the means.
    """

    validates: bool = False
    counts_batches: bool = True
    skips_nonfinite: bool = False

    def validate(self, boundaries: StepBoundaries | None, max_batches: int | None) -> Mapping[str, float]:
        """Return the means of a validation.

        Args:
            boundaries: Where signals cut it short, or ``None``.
            max_batches: On how many batches at most; ``None`` for all.
        """
        raise NotImplementedError

    def check_parameters(self) -> None:
        """Raise where the parameters must not be saved, as after a step with NaN."""

    def step_schedulers(self, train: Mapping[str, float], val: Mapping[str, float]) -> None:
        """Step what moves once an epoch, given the epoch's means of training and validation."""

    def after_epoch(self) -> None:
        """Do what the owner does after every epoch."""

    def while_open(self, loop: RunView) -> AbstractContextManager[None]:  # noqa: ARG002 - for overrides
        """Return the context in which the loop is open."""
        return nullcontext()


class Loop:
    """Goes over the batches of a run, and does between them all that a run needs.

    What :meth:`tp_trainer.Trainer.loop` returns, and what callbacks see of a run: a context manager, and an
    iterator over the batches of all epochs. Order and position, accumulation, limits, progress, signals,
    checkpoints and callbacks are its concern; what is done with a batch is that of the ``for``.

    Args:
        session: Where it runs.
        settings: The arguments of the call.
        state: What checkpoints save of it.
        train: The prepared loader.
        hooks: What ``fit``, or the trainer of a custom loop, adds.
        logs: The loggers.
        steps: How many batches make an epoch.
        watchdog: Ends a rank whose step takes too long.

    Attributes:
        meter: Adds up what the steps of the epoch return.
        state: The dict given as ``state=``, restored where the run is resumed.
        ends_step: Whether the batch at hand is the last of an optimizer step.
    """

    def __init__(
        self,
        session: Session,
        settings: LoopSettings,
        state: RunState,
        train: PreparedLoader,
        *,
        hooks: LoopHooks,
        logs: RunLog,
        steps: int,
        watchdog: Watchdog,
    ) -> None:
        checkpoints, limits = settings.checkpoints(), settings.limits
        self._session, self._settings, self._limits, self._run_state = session, settings, limits, state
        self._train, self._steps, self._accumulate = train, steps, settings.accumulate
        self._hooks, self._events, self._logs, self._watchdog = hooks, settings.events, logs, watchdog
        self._folder = None if checkpoints is None else Path(checkpoints.folder).absolute()
        self._saving = None if checkpoints is None else Saving(checkpoints, session, state, settings.backend)
        self._boundaries = StepBoundaries(session)
        self._signals = SignalWatch(session, self._boundaries, catches=self._saving is not None)
        self._reporter = Reporter(
            progress=settings.progress if session.is_main else False, epochs=limits.epochs
        )
        self._ticker = Ticker("", 0, math.inf)
        self.state = settings.state

        # How far the run is.
        self._steps_before_epoch = 0
        self._done = 0  # batches of this epoch
        self.meter = self._new_meter()
        self.ends_step = True
        self._epoch_is_over = self._is_in_step = False
        self._began_epoch = began = time.monotonic()
        self._epoch_batches: Generator[Any, None, None] | None = None

        # When to look at what is due: at a number of batches done, or at a time of this rank's clock.
        self._next_look: float = 0
        self._wake_at = math.inf
        self._ends_at = math.inf if limits.max_seconds is None else began + limits.max_seconds
        self._due_at = math.inf  # when max_time or the last checkpoint's age is a reason to ask

        # What this rank asks for, and what all ranks have agreed on.
        self._stop_reason: str | None = None
        self._save_requested = False
        # Whether anybody might call stop() or save(). Found once: a callback that joined by itself and failed
        # is left out on its rank alone, and a rank that then asked no longer would leave the others waiting.
        self._may_be_requested = hooks.counts_batches or bool(settings.events.callbacks)
        self._can_ask = session.world_size == 1  # whether any rank may ever have something to ask
        self._ending: str | None = None
        self._saves_at_epoch_end = False

        self._is_open = False
        self._open = ExitStack()
        self._warn_unsaved: Callable[[], None] = lambda: None
        self._looked_for_more = False

    # -- what the run is: for callbacks and custom loops ----------------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps made so far, over all epochs and before a resume too."""
        done, accumulate = self._done, self._accumulate
        steps = done // accumulate if done < self._steps else -(-done // accumulate)
        return self._steps_before_epoch + steps

    @property
    def epoch(self) -> int:
        """The epoch that runs, from 1."""
        return self._run_state.epoch

    @property
    def epochs(self) -> int | None:
        """How many there will be; ``None`` where another limit ends the run."""
        return self._limits.epochs

    @property
    def steps_per_epoch(self) -> int:
        """How many batches make an epoch."""
        return self._steps

    @property
    def batches_done(self) -> int:
        """Batches of this epoch that are done."""
        return self._done

    @property
    def loader(self) -> PreparedLoader:
        """The prepared loader that is trained on."""
        return self._train

    @property
    def metrics(self) -> Mapping[str, float]:
        """The newest means, those of the last epoch's training and ``"val_..."`` of the last validation."""
        return self._run_state.metrics

    @property
    def history(self) -> History:
        """The records of the epochs that are over."""
        return History(tuple(self._run_state.records), self._folder)

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """All of the run's models by name, as the user made them."""
        return self._run_state.plain_models

    @property
    def model(self) -> nn.Module:
        """The user's own module; the first one where there are several.

        Raises:
            ConfigError: The loop was given no model.
        """
        return _first("model", self.models)

    @property
    def optimizers(self) -> Mapping[str, Optimizer]:
        """All of the run's optimizers by name."""
        return self._run_state.trained.optimizers

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; the first one where there are several.

        Raises:
            ConfigError: The loop was given no optimizer.
        """
        return _first("optimizer", self.optimizers)

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler; the first one where there are several, ``None`` without one."""
        return next(iter(self._run_state.trained.schedulers.values()), None)

    @property
    def device(self) -> torch.device:
        """Where this process computes."""
        return self._session.device

    @property
    def rank(self) -> int:
        """This process among all, from 0."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """How many processes run the job."""
        return self._session.world_size

    @property
    def is_main(self) -> bool:
        """Whether this process writes the files and speaks to the terminal."""
        return self._session.is_main

    @property
    def ending(self) -> str | None:
        """Why the run ends before its last epoch, or ``None``."""
        return self._ending

    # -- what callbacks and custom loops may ask for --------------------------------------------

    def stop(self, reason: str) -> None:
        """End the run after this step, saved where checkpoints are written; one rank's word is enough.

        On several ranks they agree one or two steps later, or at the end of the epoch; where steps take
        less than a tenth of a second, within that time.
        """
        self._stop_reason = reason
        self._boundaries.call()

    def save(self) -> None:
        """Have a checkpoint written after this step; one rank's word is enough.

        Raises:
            ConfigError: The run writes no checkpoints.
        """
        if self._saving is None:
            msg = "save() needs a place for checkpoints: give fit() or loop() checkpoint=folder"
            raise ConfigError(msg)
        self._save_requested = True
        self._boundaries.call()

    def log(self, **numbers: float | Tensor) -> None:
        """Log numbers of this step; tensors stay on their device until they are read, many together.

        In a custom loop their means over the epoch are in its record.

        Raises:
            StepError: A value is not a number.
        """
        if self._hooks.counts_batches:
            self.meter.log(numbers)
        step = self.step + (self._is_in_step and not self._epoch_is_over)
        self._logs.add(numbers, step=step, epoch=self.epoch)

    # -- begin and end --------------------------------------------------------------------------

    def __enter__(self) -> Self:
        self._is_open = True
        try:
            self._enter()
        except BaseException as error:
            self.__exit__(type(error), error, None)
            raise
        return self

    def _enter(self) -> None:
        state, saving, open_ = self._run_state, self._saving, self._open
        if saving is not None:
            state.check(replay=saving.checkpointer.settings.replay)
            saving.checkpointer.open()
            open_.callback(saving.checkpointer.close)
            if saving.resume(self._settings.resume_from()):
                done = f"epoch {state.epoch}, {state.first} batches of it done"
                self._reporter.say(f"resumed from {saving.last}: {done}")
        self._steps_before_epoch = state.step - (state.first // self._accumulate)
        self._done = state.first
        self._can_ask = (
            self._can_ask or saving is not None or self._ends_at < math.inf or self._may_be_requested
        )
        # Signals are caught before the thread that passes them on begins, and until after it has ended:
        # one that comes in between would end the process unsaved.
        open_.enter_context(self._signals)
        if self._can_ask:
            open_.callback(self._boundaries.close)
            self._boundaries.open(self._has_request)
        if saving is not None:
            optimizers = self.optimizers.values()
            for words in unsaved_averages(optimizers, [*self.state.values(), *self.models.values()]):
                log.warning("no checkpoint will have %s: name it in state={...}", words)
            self._warn_unsaved = open_.enter_context(unsaved_optimizers(optimizers))
        open_.enter_context(self._hooks.while_open(self))
        max_batches = self._limits.sanity_val_batches
        if max_batches and self._hooks.validates and not state.step:
            # What fails in a validation is to fail now, and not after an epoch of hours.
            with self._keeping_generators(), self._watchdog.watching():
                self._hooks.validate(None, max_batches)
        self._logs.open(resumed=bool(state.step or state.first), step=state.step, epoch=state.epoch)
        self._events.send("on_fit_start", self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            if self._epoch_batches is not None:
                self._epoch_batches.close()
            if error is not None and not isinstance(error, SystemExit | GeneratorExit):
                self._events.send("on_exception", self, error)
        finally:
            self._logs.close(_status(error))
            self._is_open = False
            self._open.close()

    # -- epochs and batches ---------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of all epochs."""
        for batches in self.by_epoch():
            yield from batches

    def by_epoch(self) -> Iterator[Iterator[Any]]:
        """Yield an iterator over the batches of each epoch: for what is to be done between epochs.

        Raises:
            ConfigError: An epoch was left before its last batch; or the loop is not in a ``with`` block.
            LoaderError: In an epoch: the loader ended before the batches that it says it has.
        """
        if not self._is_open:
            msg = "a loop is used in a with block: with trainer.loop(...) as loop: for batch in loop: ..."
            raise ConfigError(msg)
        with guard_stop_iteration():
            while not self._has_ended():
                self._begin_epoch()
                self._epoch_batches = self._batches()
                yield self._epoch_batches
                if not self._epoch_is_over:
                    msg = (
                        f"epoch {self.epoch} was left after {self._done} of {self._steps} batches; call "
                        "stop() on the loop to end the run, or give steps_per_epoch for shorter epochs"
                    )
                    raise ConfigError(msg)
                if self._done < self._steps:
                    self._cut_epoch()
                else:
                    self._end_epoch()
            if self._saving is not None:
                self._send_checkpoint_of(self._saving.finish)
            self._logs.flush()
            if self._ending is not None:
                self._reporter.say(f"ended after step {self.step}: {self._ending}")
            self._events.send("on_fit_end", self)

    def _has_ended(self) -> bool:
        epochs, max_steps = self._limits.epochs, self._limits.max_steps
        if max_steps is not None and self.step >= max_steps and self._ending is None:
            self._ending = f"max_steps={max_steps}"
        return self._ending is not None or (epochs is not None and self.epoch > epochs)

    def _begin_epoch(self) -> None:
        state = self._run_state
        if self._limits.overfit_batches is not None:
            self._train.set_epoch(0)
        self._began_epoch = time.perf_counter() - state.seconds
        self._done = state.first
        self.meter = self._new_meter()
        if state.meter_state is not None:
            self.meter.load_state_dict(state.meter_state)
            state.meter_state = None
        if not state.first or state.logged is None:
            state.logged = self.meter.totals()
        self._epoch_is_over = False
        if not state.first:
            self._events.send("on_epoch_start", self)

    def _new_meter(self) -> Meter:
        return Meter(
            self._session,
            first_step=(self.epoch - 1) * self._steps + 1,
            tolerate=self._hooks.skips_nonfinite,
            weighs=self._run_state.weighs,
        )

    def _batches(self) -> Generator[Any, None, None]:
        """Yield the batches of an epoch: the hot path, where nothing is that a step does not need."""
        steps, accumulate, first = self._steps, self._accumulate, self._run_state.first
        note_step = self._watchdog.note_step if self._watchdog.is_on else None
        count = self.meter.count if self._hooks.counts_batches else None
        sends_step_end = self._events.has("on_step_end")
        boundaries, now = self._boundaries, time.monotonic
        done = first
        shown = self._reporter.epoch(self.epoch, steps, first=first)
        with guard_stop_iteration(), shown as self._ticker, self._watchdog.watching():
            self._next_look = self._at_boundary(done)
            if self._ending is None:
                batches = iter(self._train)
                try:
                    for batch in islice(batches, steps - first):
                        if accumulate > 1:
                            self.ends_step = (done + 1) % accumulate == 0 or done + 1 == steps
                        if note_step is not None:
                            note_step()
                        yield batch
                        done += 1
                        self._done = done
                        if count is not None:
                            count()
                        if sends_step_end and self.ends_step:
                            self._run_state.step, self._is_in_step = self.step, False
                            self._events.send("on_step_end", self)
                            self._is_in_step = True
                        if self.ends_step:
                            boundaries.passed += 1  # before the look at the flag: the thread relies on it
                            if boundaries.calls or done >= self._next_look or now() >= self._wake_at:
                                self._next_look = self._at_boundary(done, ended_step=True)
                                if self._ending is not None:
                                    break
                    if done == steps and not self._looked_for_more:
                        self._warn_more_batches()
                finally:
                    # Who keeps an exception, as a notebook does, has this frame: the iterator's workers would
                    # live on, to be collected in those that a later iterator forks.
                    del batches
            if done < steps and self._ending is None:
                give = f"give steps_per_epoch={done}, or a loader that has as many batches as it says"
                if not done:
                    give = (
                        "an iterator, such as a generator, is gone through once: give what begins anew, such "
                        "as a list or a DataLoader, or look at why it has no batch"
                    )
                msg = f"the loader ended after {done} of {steps} batches; {give}"
                raise LoaderError(msg)
            self.meter.flush()
        self._epoch_is_over = True

    def _warn_more_batches(self) -> None:
        """Warn of a loader that has more batches than its length says, by which the epochs were cut."""
        limits = self._limits
        if limits.steps_per_epoch is not None or limits.overfit_batches is not None:
            self._looked_for_more = True  # the epochs' length is not the loader's
        elif self._train.has_more():
            self._looked_for_more = True
            log.warning(
                "the loader has more than the %d batches that its len() said when the run began, and each "
                "epoch ends after %d of them; correct its __len__(), or give steps_per_epoch=",
                self._steps,
                self._steps,
            )

    # -- the step boundary: what is due between two optimizer steps -----------------------------

    def _at_boundary(self, done: int, *, ended_step: bool = False) -> float:
        """Do what is due between two optimizer steps; return at how many batches to look again."""
        limits, ticker, steps = self._limits, self._ticker, self._steps
        if time.monotonic() >= ticker.next_update:
            ticker.update(done, self.meter.last_loss)
        step, looks = self.step, [math.inf]
        self._run_state.step, self._is_in_step = step, False
        if self._logs.is_on:
            if ended_step and step % self._logs.every == 0:
                self._log_loss()
                self._logs.flush()
            looks.append(self._batches_after(self._logs.every - step % self._logs.every))
        if limits.val_every_steps is not None:
            every = limits.val_every_steps
            if done and done < steps and step % every == 0 and self._run_state.validated_at != step:
                self._validate(done)
                self._logs.flush()
            looks.append(self._batches_after(every - step % every))
        if limits.max_steps is not None:
            if step >= limits.max_steps:
                self._ending = f"max_steps={limits.max_steps}"
            looks.append(self._batches_after(max(limits.max_steps - step, 1)))
        decision = self._decide(at_epoch=not ended_step)
        if decision.stop is not None:
            self._ending = decision.stop
        saving = self._saving
        if saving is not None:
            left = saving.checkpointer.steps_left(step)
            is_due = decision.is_due or decision.save or saving.checkpointer.is_due(step)
            if is_due and done == steps and not decision.signal:
                # After the validation, whose outcome may decide which checkpoint is the best.
                self._saves_at_epoch_end = True
            elif is_due or decision.signal:
                self._save(done, self.meter)
            if decision.signal:
                self._interrupt(decision.signal)
            if left is not None:
                looks.append(self._batches_after(left))
        # When the clock next gives a reason to ask; rank 0's alone counts.
        self._due_at = min(self._ends_at, math.inf if saving is None else saving.checkpointer.due_at)
        # On several ranks a thread looks at that: a rank that asked by its own clock would ask alone.
        self._wake_at = min(ticker.next_update, self._due_at if self.world_size == 1 else math.inf)
        self._is_in_step = True
        return min(looks)

    def _batches_after(self, more: int) -> int:
        """Return how many batches are done when ``more`` further optimizer steps are."""
        return min((self._done // self._accumulate + more) * self._accumulate, self._steps)

    def _decide(self, *, at_epoch: bool) -> Decision:
        """Return what the ranks agree on, if they ask each other now; at epochs they do without a reason."""
        boundaries = self._boundaries
        if not self._can_ask or not (at_epoch or boundaries.is_meeting()):
            return Decision()
        saving, now = self._saving, time.monotonic()
        stop = self._stop_reason or (f"max_time={self._limits.max_time}" if now >= self._ends_at else None)
        is_old = saving is not None and self._done > 0 and now >= saving.checkpointer.due_at
        self._due_at = math.inf  # it has been asked for: what is due will be done before it is due again
        decision = self._signals.decide(due=is_old, stop=stop, save=self._save_requested)
        self._save_requested = False
        if not at_epoch:
            boundaries.has_met()
        return decision

    def _has_request(self) -> bool:
        """Return whether this rank has something to ask the others, besides signals.

        The thread of the boundaries calls it: it only reads, each attribute once.
        """
        is_due = self.is_main and time.monotonic() >= self._due_at
        return is_due or self._save_requested or self._stop_reason is not None

    # -- the ends of epochs ---------------------------------------------------------------------

    def _end_epoch(self) -> None:
        state, hooks, saving = self._run_state, self._hooks, self._saving
        hooks.check_parameters()
        state.step = self.step
        record = self._record()
        hooks.step_schedulers(record.train, record.val)
        state.records.append(record)
        self._reporter.done(record)
        hooks.after_epoch()
        self._events.send("on_epoch_end", self)
        check_same_optimizers(self._session, self.optimizers)  # which a scheduler or a callback has moved
        steps_made = self.step  # by the epoch that ended: it is counted by _done, which begins anew
        state.epoch, state.first = state.epoch + 1, 0
        self._steps_before_epoch, self._done = steps_made, 0
        asks = self.world_size == 1 or self._may_be_requested
        decision = self._decide(at_epoch=True) if asks else Decision()
        self._ending = self._ending or decision.stop
        if saving is not None:
            is_due = self._saves_at_epoch_end or decision.save or saving.ends_epoch(state.epoch - 1)
            if is_due or self._has_ended():
                self._saves_at_epoch_end = False
                self._save(0, None)
            saving.check_best()
            if decision.signal:
                self._save(0, None)
                self._interrupt(decision.signal)

    def _cut_epoch(self) -> None:
        """End the run within an epoch: saved as it stands, with a record of what was done of it."""
        state, done = self._run_state, self._done
        if done == state.first and state.records:
            return
        seconds = time.perf_counter() - self._began_epoch
        meter_state, logged = self.meter.state_dict(), state.logged
        # The record reads the meter and validates; the checkpoint is of the moment before, from which a
        # resumed run goes through the rest of the epoch as an uninterrupted one would.
        with self._keeping_generators():
            self._hooks.check_parameters()
            record = self._record()
        self.meter.load_state_dict(meter_state)
        state.logged = logged
        state.seconds = seconds
        self._save(done, self.meter)
        state.records.append(record)
        self._reporter.done(record)

    def _record(self) -> EpochRecord:
        """Return the record of the epoch, having validated."""
        state = self._run_state
        state.weighs, state.seconds = self.meter.weighs, 0.0
        seconds = time.perf_counter() - self._began_epoch
        optimizer = next(iter(self.optimizers.values()), None)
        rate = math.nan if optimizer is None else float(optimizer.param_groups[0]["lr"])
        if self._logs.is_on:
            self._log_loss()  # of the steps of this epoch that no row has yet
        val = self._validate(self._done)
        train = self.meter.means()  # only now: with it the meter has what all ranks have counted
        state.metrics = train | {f"val_{name}": value for name, value in val.items()}
        record = EpochRecord(self.epoch, self.step, self.meter.samples, seconds, rate, train, val)
        numbers = {f"epoch_{name}": value for name, value in train.items()}
        numbers |= {"learning_rate": rate, "epoch_samples_per_s": record.samples_per_s}
        self._logs.add(numbers, step=self.step, epoch=self.epoch)
        self._logs.flush()
        return record

    # -- to validate, to log, to save, to be interrupted ----------------------------------------

    def _validate(self, done: int) -> dict[str, float]:
        """Validate, and add the outcome to what the loggers get at the next flush.

        A signal that comes meanwhile, to any rank, ends the run as it was before.
        """
        if not self._hooks.validates:
            return {}
        self._events.send("on_validation_start", self)
        boundaries = None if self._saving is None else self._boundaries
        try:
            with self._watchdog.watching():
                means = dict(self._hooks.validate(boundaries, None))
        except GatherInterruptedError as cut:
            # What callbacks have put in the place of the model's weights is not to be saved.
            self._events.send("on_validation_end", self, {})
            self._save(done, self.meter)
            self._interrupt(cut.signal)
        self._boundaries.begin_phase(evaluates=False)
        state = self._run_state
        state.validated_at = self.step
        numbers = {f"val_{name}": value for name, value in means.items()}
        trained = {name: value for name, value in state.metrics.items() if not name.startswith("val_")}
        state.metrics = trained | numbers
        self._logs.add(numbers, step=self.step, epoch=self.epoch)
        self._events.send("on_validation_end", self, means)
        return means

    def _keeping_generators(self) -> ExitStack:
        """Return a context after which the random generators are where they were."""
        before = generators.capture(self._session.job.devices)
        stack = ExitStack()
        stack.callback(generators.restore, before)
        return stack

    def _log_loss(self) -> None:
        """Log the mean loss of the steps since the last time, of this rank's samples."""
        if self._hooks.counts_batches:
            return
        losses, weight = self.meter.totals()
        before, self._run_state.logged = self._run_state.logged or (0.0, 0.0), (losses, weight)
        numbers = {}
        if weight > before[1]:
            numbers["loss"] = (losses - before[0]) / (weight - before[1])
        optimizer = next(iter(self.optimizers.values()), None)
        if optimizer is not None:
            numbers["learning_rate"] = float(optimizer.param_groups[0]["lr"])
        self._logs.add(numbers, step=self.step, epoch=self.epoch)

    def _save(self, done: int, meter: Meter | None) -> None:
        """Save the state after ``done`` batches of the epoch that begins or runs."""
        saving = self._saving
        if saving is None:
            return
        if meter is not None:
            self._run_state.seconds = time.perf_counter() - self._began_epoch
            self._hooks.check_parameters()
            check_same_optimizers(self._session, self.optimizers)
        with self._watchdog.paused():
            self._send_checkpoint_of(lambda: saving.save(done, meter))
        self._warn_unsaved()

    def _send_checkpoint_of(self, save: Callable[[], None]) -> None:
        """Call ``save``; send the event where a checkpoint has become complete since.

        It may be the one before: files are written by a thread, while the run goes on.
        """
        saving = self._saving
        before = None if saving is None else saving.last
        save()
        if saving is not None and saving.last is not None and saving.last != before:
            self._logs.event("checkpoint", {"name": saving.last.name}, step=self.step, epoch=self.epoch)
            self._events.send("on_checkpoint_saved", self, Path(saving.last))

    def _interrupt(self, number: int) -> None:
        """End the run that a signal asked to end, saved.

        Raises:
            Interrupted: Always.
        """
        saving = self._saving
        saved = None
        if saving is not None:
            self._send_checkpoint_of(saving.finish)
            saved = saving.last
        facts = {
            "signal": signal.Signals(number).name,
            "saved": "nothing" if saved is None else saved.name,
            "seconds": round(self._signals.seconds_since(), 3),
        }
        self._logs.event("interruption", facts, step=self.step, epoch=self.epoch)
        self._events.send("on_interruption", self, number)
        # Raised from no variable: in a cycle with this frame it would keep the loader's workers alive.
        raise interrupted(number, self._session, step=self.step, saved=saved)


def _first(what: str, named: Mapping[str, T]) -> T:
    if not named:
        msg = f"the loop was given no {what}: name it in state={{...}}"
        raise ConfigError(msg)
    return next(iter(named.values()))


def _status(error: BaseException | None) -> RunStatus:
    if error is None:
        return "finished"
    return "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"


def build_loop(
    session: Session,
    settings: LoopSettings,
    targets: "CheckpointTargets",
    train: PreparedLoader,
    *,
    hooks: LoopHooks,
    watchdog: Watchdog,
    logs: RunLog,
    optimizer_step: OptimizerStep | None = None,
) -> Loop:
    """Return a loop that is ready to begin, once all ranks have been found to mean the same.

    Raises:
        ConfigError: An epoch has no batches.
        DisagreementError: The ranks were given different arguments, or optimizers with different settings.
        LoaderError: The loader has no length, or less than the limits want.

    Collectives: two gathers of objects.
    """
    steps = _steps_in(train, settings.limits)
    train.continues_stream = settings.limits.overfit_batches is None and not settings.limits.restart_stream
    logged = {LOG_STATE: logs} if logs.is_asked else {}
    user_state = UserState(
        session, settings.state, targets.others, callbacks={**settings.events.states(), **logged}
    )
    kinds = {
        "log": logs.is_asked,
        "models": sorted(targets.trained.models),
        "optimizers": sorted(targets.trained.optimizers),
    }
    check_same(session, {**settings.facts(steps), **kinds})
    check_same_optimizers(session, targets.trained.optimizers)
    state = RunState(session, targets.trained, user_state, train, optimizer_step)
    return Loop(session, settings, state, train, hooks=hooks, logs=logs, steps=steps, watchdog=watchdog)


def _steps_in(train: PreparedLoader, limits: Limits) -> int:
    """Return how many batches make an epoch.

    Raises:
        ConfigError: The loader has no batches.
        LoaderError: The loader has no length and none was given, or less than was given.
    """
    wanted = limits.steps_per_epoch
    try:
        has = len(train)
    except LoaderError:
        if wanted is None:
            raise
        has = wanted
    check_positive("the number of batches in the loader", has)
    if wanted is not None and wanted > has:
        msg = (
            f"steps_per_epoch={wanted} is more than the loader has: it would have ended after {has} of "
            f"{wanted} batches; give steps_per_epoch={has}, or none, and more epochs"
        )
        raise LoaderError(msg)
    steps = has if wanted is None else wanted
    return steps if limits.overfit_batches is None else min(steps, limits.overfit_batches)


@dataclass(frozen=True, slots=True)
class CheckpointTargets:
    """The user's ``state=`` by kinds.

    Attributes:
        trained: Models, optimizers and schedulers, as the backend has them.
        others: The names of all else.
    """

    trained: Trained
    others: tuple[str, ...]


def classify_state(
    session: Session,
    state: Mapping[str, Any],
    *,
    prepared: Callable[[nn.Module], nn.Module | None],
    scaler: LossScaler | None,
    models: Mapping[str, nn.Module] | None = None,
    optimizers: Mapping[str, Optimizer] | None = None,
    schedulers: Mapping[str, Any] | None = None,
) -> CheckpointTargets:
    """Return the user's ``state=`` by kinds, with what the run has besides.

    A module is a model where it was prepared, or where an optimizer in ``state`` has its parameters; any
    other one, such as an average of weights, is kept as it is.

    Args:
        session: Says which optimizers can step.
        state: What the user named.
        prepared: Returns the prepared model of a module, if it was prepared.
        scaler: Scales the loss, or ``None``.
        models: Models that the run has anyway.
        optimizers: Optimizers that the run has anyway.
        schedulers: Schedulers that the run has anyway.

    Raises:
        ConfigError: A name is taken, or an optimizer has parameters of no model in ``state``, or cannot
            step what it has.
    """
    models, optimizers, schedulers = dict(models or {}), dict(optimizers or {}), dict(schedulers or {})
    for taken in (models, optimizers, schedulers):
        for name in taken:
            if name in state:
                msg = f"state= cannot have {name!r}: fit() keeps its own {name} under that name"
                raise ConfigError(msg)
    optimizers |= {name: value for name, value in state.items() if isinstance(value, Optimizer)}
    trained = {id(p) for one in optimizers.values() for group in one.param_groups for p in group["params"]}
    others = []
    for name, value in state.items():
        if isinstance(value, nn.Module):
            found = prepared(value)
            if found is not None:
                models[name] = found
            elif any(id(p) in trained for p in value.parameters()):
                models[name] = value
            else:
                others.append(name)
        elif isinstance(value, LRScheduler | ReduceLROnPlateau):
            schedulers[name] = value
        elif not isinstance(value, Optimizer):
            others.append(name)
    known = {id(p) for model in models.values() for p in model.parameters()}
    for name, one in optimizers.items():
        session.check_optimizer(one)
        parameters = [p for group in one.param_groups for p in group["params"]]
        if name in state and any(id(p) not in known for p in parameters):
            msg = (
                f"the optimizer {name!r} in state= has parameters of no model there, so what it trains would "
                "be lost: name the model too, as in state={'model': model, 'optimizer': optimizer}"
            )
            raise ConfigError(msg)
    return CheckpointTargets(Trained(models, optimizers, schedulers, scaler), tuple(others))
