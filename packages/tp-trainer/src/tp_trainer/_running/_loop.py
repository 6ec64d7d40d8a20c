"""The loop over batches of every run, with everything that happens between two batches."""

import logging
import math
import signal
import time
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.data import PreparedLoader, Share
from tp_core.errors import ConfigError, LoaderError
from tp_core.internal import capture_rng_state, restore_rng_state
from tp_core.plugins import RunStatus, RunView, Session

from tp_trainer._metrics import GatherInterruptedError
from tp_trainer._opening._agreement import check_same_optimizers
from tp_trainer._opening._boundaries import Decision, Interrupted, SignalWatch, StepBoundaries, interrupted
from tp_trainer._running._history import EpochRecord, History
from tp_trainer._running._log import RunLog
from tp_trainer._running._progress import Reporter, Ticker
from tp_trainer._running._settings import LoopSettings, batches_per_epoch, seconds_of
from tp_trainer._running._state import (
    RunState,
    Saving,
    unsaved_averages,
    unsaved_optimizers,
)
from tp_trainer._steps._meter import Meter
from tp_trainer._steps._optimizer_step import OptimizerStep
from tp_trainer._steps._step import guard_stop_iteration

if TYPE_CHECKING:
    from tp_trainer._running._watchdog import Watchdog


log = logging.getLogger("tp_trainer")

LOG_STATE = "run:loggers"
"""The name of the loggers' state in checkpoints; no callback's name has this form."""

T = TypeVar("T")


class LoopHooks:
    """The hooks that ``fit`` or a custom loop adds; here without effect.

    Attributes:
        counts_batches: Whether the loop itself counts batches and samples, as it sees no losses.
        skips_nonfinite: Whether steps with a NaN or infinite loss are left out of the means.
    """

    counts_batches: bool = True
    skips_nonfinite: bool = False
    optimizer_step: OptimizerStep | None = None

    def validate(self, boundaries: StepBoundaries | None, max_batches: int | None) -> Mapping[str, float]:
        """Return the means of a validation on ``max_batches`` at most; signals end it at ``boundaries``."""
        raise NotImplementedError

    def check_parameters(self) -> None:
        """Raise if the parameters must not be saved, as after a step with NaN."""

    def step_schedulers(self, train: Mapping[str, float], val: Mapping[str, float]) -> None:
        """Step the schedulers that step once per epoch, given the means of training and validation."""

    def facts(self) -> dict[str, object]:
        """Return what all ranks must have been given alike, beside the facts of the loop."""
        return {}

    def while_open(self, loop: RunView) -> AbstractContextManager[None]:  # noqa: ARG002 - for overrides
        """Return the context in which the loop is open."""
        return nullcontext()


class Loop:
    """Iterates over the batches of a run, and handles everything between them.

    :meth:`tp_trainer.Trainer.loop` returns it, and callbacks get it: a context manager, and an iterator over
    the batches of all epochs. The loop handles order and position, accumulation, limits, progress, signals,
    checkpoints and callbacks. The body of the ``for`` handles the batch.

    Args:
        session: The session of the run.
        settings: The settings of the call.
        state: The state that checkpoints save.
        train: The prepared loader.
        hooks: The hooks of ``fit`` or of a custom loop.
        logs: The loggers.
        steps: The number of batches in an epoch.
        watchdog: Ends a rank if a step takes too long; ``None`` where it may take any time.

    Attributes:
        meter: Adds up the outputs of the epoch's steps.
        state: The dict given as ``state=``, with restored values after a resume.
        ends_step: Whether this batch is the last of an optimizer step.
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
        watchdog: "Watchdog | None",
    ) -> None:
        checkpoints, limits = settings.checkpoint, settings.limits
        self._session, self._settings, self._run_state = session, settings, state
        self._limits, self._validation = limits, settings.validation
        self._train, self._steps, self._accumulate = train, steps, session.job.accumulate
        self._share: Share | None = None  # of the current batch
        self._hooks, self._events, self._logs, self._watchdog = hooks, settings.events, logs, watchdog
        self._folder = None if checkpoints is None else Path(checkpoints.folder).absolute()
        self._saving = None if checkpoints is None else Saving(checkpoints, session, state, settings.backend)
        self._boundaries = StepBoundaries(session)
        self._signals = SignalWatch(session, self._boundaries, catches=self._saving is not None)
        shows = session.is_main and settings.progress is not False
        self._reporter = Reporter(progress=settings.progress) if shows else None
        self._ticker: Ticker | None = None
        self.state = settings.state

        # The position of the run.
        self._steps_before_epoch = 0
        self._done = 0  # batches of this epoch
        self.meter = self._new_meter()
        self.ends_step = True
        self._epoch_is_over = self._is_in_step = False
        self._began_epoch = began = time.monotonic()
        self._epoch_batches: Generator[Any, None, None] | None = None

        self._measured: tuple[float, dict[str, float]] = began, {}  # when the epoch began, and sums then

        # The next look at what is due: at a number of batches done, or at a time of this rank's clock.
        self._next_look: float = 0
        self._wake_at = math.inf
        self._ends_at = math.inf if limits.max_time is None else began + seconds_of(limits.max_time)
        self._due_at = math.inf  # when max_time or the age of the last checkpoint gives a reason to ask

        # The requests of this rank, and the agreement of all ranks.
        self._stop_reason: str | None = None
        self._save_requested = False
        # Whether anything might call stop() or save(). Set once: a self-joined callback that fails is left
        # out on its rank alone, and a rank that then asked no longer would leave the others waiting.
        self._may_be_requested = hooks.counts_batches or bool(settings.events.callbacks)
        self._can_ask = session.world_size == 1  # whether any rank may ever have a request
        self._ending: str | None = None
        self._saves_at_epoch_end = False

        self._is_open = False
        self._open = ExitStack()
        self._warn_unsaved: Callable[[], None] = lambda: None
        self._looked_for_more = False

    # -- properties of the run, for callbacks and custom loops ----------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps made so far, over all epochs, those before a resume included."""
        done, accumulate = self._done, self._accumulate
        steps = done // accumulate if done < self._steps else -(-done // accumulate)
        return self._steps_before_epoch + steps

    @property
    def epoch(self) -> int:
        """The current epoch, from 1."""
        return self._run_state.epoch

    @property
    def epochs(self) -> int | None:
        """The number of epochs; ``None`` if another limit ends the run."""
        return self._limits.epochs

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return self._steps

    @property
    def batches_done(self) -> int:
        """Batches of this epoch that are done."""
        return self._done

    @property
    def loader(self) -> PreparedLoader:
        """The prepared training loader."""
        return self._train

    @property
    def metrics(self) -> Mapping[str, float]:
        """The newest means, of the last epoch's training and of the last validation as ``"val_..."``."""
        return self._run_state.metrics

    @property
    def history(self) -> History:
        """The records of the past epochs."""
        return History(tuple(self._run_state.records), self._folder)

    @property
    def models(self) -> Mapping[str, nn.Module]:
        """The user's own modules of the run, by name."""
        return self._run_state.plain_models

    @property
    def model(self) -> nn.Module:
        """The user's own module; the first one of several.

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
        """The optimizer; the first one of several.

        Raises:
            ConfigError: The loop was given no optimizer.
        """
        return _first("optimizer", self.optimizers)

    @property
    def scheduler(self) -> Any:
        """The learning-rate scheduler; the first one of several, ``None`` without one."""
        return next(iter(self._run_state.trained.schedulers.values()), None)

    @property
    def device(self) -> torch.device:
        """The device of this process."""
        return self._session.device

    @property
    def rank(self) -> int:
        """The rank of this process, from 0."""
        return self._session.rank

    @property
    def world_size(self) -> int:
        """The number of processes of the job."""
        return self._session.world_size

    @property
    def backend(self) -> str:
        """The name of the backend that runs the job."""
        return self._settings.backend

    @property
    def is_main(self) -> bool:
        """Whether this process is rank 0, which writes files and prints."""
        return self._session.is_main

    @property
    def ending(self) -> str | None:
        """The reason for which the run ends before its last epoch, or ``None``."""
        return self._ending

    # -- requests of callbacks and custom loops -------------------------------------------------

    def stop(self, reason: str) -> None:
        """End the run after this step, with a checkpoint if the run writes any; one rank may call it.

        Several ranks agree one or two steps later, or at the end of the epoch. If steps take less than a
        tenth of a second, they agree within that time.
        """
        self._stop_reason = reason
        self._boundaries.call()

    def save(self) -> None:
        """Write a checkpoint after this step; one rank may call it.

        Raises:
            ConfigError: The run writes no checkpoints.
        """
        if self._saving is None:
            msg = "save() needs a place for checkpoints: give fit() or loop() checkpoint=folder"
            raise ConfigError(msg)
        self._save_requested = True
        self._boundaries.call()

    def log(self, **numbers: float | Tensor) -> None:
        """Log numbers of this step. Tensors stay on their device, and many are read together.

        In a custom loop the epoch's record has their means.

        Raises:
            StepError: A value is not a number.
        """
        if self._hooks.counts_batches:
            self.meter.log(numbers, self._share)
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
        if self._settings.choice:
            self._say(self._settings.choice)
        if saving is not None:
            state.check(replay=saving.checkpointer.settings.replay)
            saving.checkpointer.open()
            open_.callback(saving.checkpointer.close)
            if saving.resume(self._settings.resume):
                done = f"epoch {state.epoch}, {state.first} batches of it done"
                self._say(f"resumed from {saving.last}: {done}")
            if words := state.note_frozen():
                self._say(words)
        self._steps_before_epoch = state.step - (state.first // self._accumulate)
        self._done = state.first
        self._can_ask = (
            self._can_ask or saving is not None or self._ends_at < math.inf or self._may_be_requested
        )
        # Handlers are set before the thread of the boundaries starts, and removed after it has ended (the
        # stack closes in reverse): a signal in between would end the process unsaved.
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
        if self._watchdog is not None:
            self._watchdog.connect(self._session)
        max_batches = 0 if self._validation is None else self._validation.sanity_batches
        if max_batches and not state.step:
            # A validation that fails must fail now, and not after an epoch of hours.
            with self._keeping_generators(), self._watching():
                self._hooks.validate(None, max_batches)
        self._logs.open(resumed=bool(state.step or state.first), step=state.step, epoch=state.epoch)
        self._events.send("on_fit_start", self)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            # Ends the loader's iteration and the watchdog's thread now: a caught exception holds the frame.
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
        """Yield an iterator over the batches of each epoch, for code between epochs.

        Raises:
            ConfigError: An epoch was left before its last batch; or the loop is not in a ``with`` block.
            LoaderError: In an epoch: the loader has fewer batches than its length.
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
                        "stop() on the loop to end the run, or give Limits(steps_per_epoch=...)"
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
                self._say(f"ended after step {self.step}: {self._ending}")
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
        if self._limits.steps_per_epoch is None and hasattr(self._train.loader, "batches_in"):
            self._steps = batches_per_epoch(self._train, self._limits)
        self._measured = time.perf_counter(), self._train.measured()
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
        """Yield the batches of an epoch, and handle what is due between them.

        This is the hot path: attributes are bound to locals, and `_at_boundary` runs only when something is
        due.

        Collectives: as in `_at_boundary`.
        """
        steps, accumulate, first = self._steps, self._accumulate, self._run_state.first
        note_step = None if self._watchdog is None else self._watchdog.note_step
        count = self.meter.count if self._hooks.counts_batches else None
        sends_step_end = self._events.has("on_step_end")
        boundaries, now = self._boundaries, time.monotonic
        done = first
        reporter = self._reporter
        shown = nullcontext() if reporter is None else reporter.epoch(self._epoch_label(), steps, first=first)
        with guard_stop_iteration(), shown as self._ticker, self._watching():
            self._next_look = self._at_boundary(done)
            if self._ending is None:
                train = self._train
                batches = iter(train)
                try:
                    for batch in islice(batches, steps - first):
                        self._share = train.share  # now: the code of the step may iterate the loader, too
                        if accumulate > 1:
                            self.ends_step = (done + 1) % accumulate == 0 or done + 1 == steps
                        if note_step is not None:
                            note_step()
                        yield batch
                        done += 1
                        self._done = done
                        if count is not None:
                            count(self._share)
                        if sends_step_end and self.ends_step:
                            self._run_state.step, self._is_in_step = self.step, False
                            self._events.send("on_step_end", self)
                            self._is_in_step = True
                        if self.ends_step:
                            # Before the flag is read: see `StepBoundaries._vote`, which relies on this order.
                            boundaries.passed += 1
                            if boundaries.calls or done >= self._next_look or now() >= self._wake_at:
                                self._next_look = self._at_boundary(done, ended_step=True)
                                if self._ending is not None:
                                    break
                    if done == steps and not self._looked_for_more:
                        self._warn_more_batches()
                finally:
                    # A kept exception, as in a notebook, holds this frame. The iterator's workers would stay
                    # alive, and a later iterator's forked workers would collect them.
                    del batches
            if done < steps and self._ending is None:
                give = f"give Limits(steps_per_epoch={done}), or a loader that has as many batches as it says"
                if not done:
                    give = (
                        "an iterator or a generator is gone through once: give what begins again, a list or "
                        "a DataLoader, or look at why it has no batch"
                    )
                msg = f"the loader ended after {done} of {steps} batches; {give}"
                raise LoaderError(msg)
            self.meter.flush()
        self._epoch_is_over = True

    def _warn_more_batches(self) -> None:
        """Warn if the loader has more batches than its length, which cut the epochs short."""
        limits = self._limits
        if limits.steps_per_epoch is not None or limits.overfit_batches is not None:
            self._looked_for_more = True  # the user chose another length
        elif self._train.has_more():
            self._looked_for_more = True
            log.warning(
                "the loader has more than the %d batches that its len() said when the run began, and each "
                "epoch ends after %d of them; correct its __len__(), or give Limits(steps_per_epoch=...)",
                self._steps,
                self._steps,
            )

    # -- the step boundary, between two optimizer steps -----------------------------------------

    def _at_boundary(self, done: int, *, ended_step: bool = False) -> float:
        """Do what is due between two optimizer steps; return the number of batches at which to look again.

        Collectives: as in `_decide`, `_validate` and `_save`, where they are due. All ranks do the same,
        since limits are the same and everything else is agreed on in `_decide`.
        """
        limits, ticker, steps = self._limits, self._ticker, self._steps
        if ticker is not None and time.monotonic() >= ticker.next_update:
            ticker.update(done, self.meter.last_loss, self._measured_here())
        step, looks = self.step, [math.inf]
        self._run_state.step, self._is_in_step = step, False
        if self._logs.is_on:
            if ended_step and step % self._logs.every == 0:
                self._log_loss()
                self._logs.flush()
            looks.append(self._batches_after(self._logs.every - step % self._logs.every))
        if self._validation is not None and self._validation.every_steps is not None:
            every = self._validation.every_steps
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
                # Not before the validation: its result may decide which checkpoint is the best.
                self._saves_at_epoch_end = True
            elif is_due or decision.signal:
                self._save(done, self.meter)
            if decision.signal:
                self._interrupt(decision.signal)
            if left is not None:
                looks.append(self._batches_after(left))
        # When the clock next gives a reason to ask; only rank 0's clock counts.
        self._due_at = min(self._ends_at, math.inf if saving is None else saving.checkpointer.due_at)
        # With several ranks the boundaries' thread reads it: a rank that asked by its own clock would ask
        # alone, as test_ranks_save_and_end_by_the_clock_of_the_first shows.
        self._wake_at = self._due_at if self.world_size == 1 else math.inf
        if ticker is not None:
            self._wake_at = min(self._wake_at, ticker.next_update)
        self._is_in_step = True
        return min(looks)

    def _batches_after(self, more: int) -> int:
        """Return the number of batches done after ``more`` further optimizer steps."""
        return min((self._done // self._accumulate + more) * self._accumulate, self._steps)

    def _decide(self, *, at_epoch: bool) -> Decision:
        """Return the agreement of the ranks, if they meet here; at the end of an epoch they always do.

        Collectives: as in `SignalWatch.decide`, if they meet.
        """
        boundaries = self._boundaries
        if not self._can_ask or not (at_epoch or boundaries.is_meeting()):
            return Decision()
        saving, now = self._saving, time.monotonic()
        stop = self._stop_reason or (f"max_time={self._limits.max_time}" if now >= self._ends_at else None)
        is_old = saving is not None and self._done > 0 and now >= saving.checkpointer.due_at
        self._due_at = math.inf  # asked for now; `_at_boundary` sets it again
        decision = self._signals.decide(due=is_old, stop=stop, save=self._save_requested)
        self._save_requested = False
        if not at_epoch:
            boundaries.has_met()
        return decision

    def _has_request(self) -> bool:
        """Return whether this rank has a request, besides signals.

        The boundaries' thread calls it: it only reads, and reads each attribute once.
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
        self._say(f"{self._epoch_label()}  {record}")
        self._events.send("on_epoch_end", self)
        if self._session.data_size > 1:
            check_same_optimizers(
                self._session, self.optimizers
            )  # a scheduler or a callback may have set them
        steps_made = self.step  # before _done is reset: the property is computed from it
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
        """End the run within an epoch: save it here, and record the part of the epoch that was done.

        Collectives: as in `_record` and `_save`.
        """
        state, done = self._run_state, self._done
        if done == state.first and state.records:
            return
        seconds = time.perf_counter() - self._began_epoch
        meter_state, logged = self.meter.state_dict(), state.logged
        # The record changes the meter and validates, so meter and generators are put back before the save: a
        # resumed run then goes through the rest of the epoch as an uninterrupted one does.
        with self._keeping_generators():
            self._hooks.check_parameters()
            record = self._record()
        self.meter.load_state_dict(meter_state)
        state.logged = logged
        state.seconds = seconds
        self._save(done, self.meter)
        state.records.append(record)
        self._say(f"{self._epoch_label()}  {record}")

    def _measured_here(self) -> dict[str, float]:
        """Return what the loader measured of this rank's batches since the epoch began here."""
        before = self._measured[1]
        return {name: value - before.get(name, 0.0) for name, value in self._train.measured().items()}

    def _data(self) -> dict[str, float]:
        """Return what the loader measured since the epoch began here, over all data ranks.

        Collectives: one gather of objects and one all-reduce, for a loader that measures.
        """
        session, mine = self._session, self._measured_here()
        if not mine:
            return {}
        seconds = time.perf_counter() - self._measured[0]
        # A rank without a sample so far may lack names.
        names = sorted({name for theirs in session.gather_objects(sorted(mine)) for name in theirs})
        sums = [mine.get(name, 0.0) for name in names]
        totals = session.reduce(torch.tensor(sums, dtype=torch.float64))
        found = dict(zip(names, totals.tolist(), strict=True))
        if "wait_s" in found:
            found["wait_s"] /= session.data_size
        if found.get("padded_tokens"):
            found |= {
                "fill": found["tokens"] / found["padded_tokens"],
                "tokens_per_s": found["tokens"] / seconds,
            }
        return found

    def _record(self) -> EpochRecord:
        """Validate, and return the record of the epoch.

        Collectives: as in `_validate` and `Meter.means`.
        """
        state = self._run_state
        state.weighs, state.seconds = self.meter.weighs, 0.0
        seconds = time.perf_counter() - self._began_epoch
        data = self._data()  # before the validation: its time does not count
        optimizer = next(iter(self.optimizers.values()), None)
        rate = math.nan if optimizer is None else float(optimizer.param_groups[0]["lr"])
        if self._logs.is_on:
            self._log_loss()  # the steps since the last row
        val = self._validate(self._done)
        # After the validation, where a signal saves this rank's own sums: means() adds up all ranks' samples.
        train = self.meter.means()
        state.metrics = train | {f"val_{name}": value for name, value in val.items()}
        record = EpochRecord(self.epoch, self.step, self.meter.samples, seconds, rate, train, val, data)
        numbers = {f"epoch_{name}": value for name, value in [*train.items(), *data.items()]}
        numbers |= {"learning_rate": rate, "epoch_samples_per_s": record.samples_per_s}
        self._logs.add(numbers, step=self.step, epoch=self.epoch)
        self._logs.flush()
        return record

    def _epoch_label(self) -> str:
        epochs = self._limits.epochs
        return f"epoch {self.epoch}" if epochs is None else f"epoch {self.epoch}/{epochs}"

    def _say(self, line: str) -> None:
        log.info(line)
        if self._reporter is not None:
            self._reporter.say(line)

    # -- validation, logs, checkpoints, interruption --------------------------------------------

    def _validate(self, done: int) -> dict[str, float]:
        """Validate, and buffer the results for the loggers.

        If a rank gets a signal meanwhile, the run ends with the state before the validation.

        Collectives: as in the validation's evaluations.
        """
        if self._validation is None:
            return {}
        self._events.send("on_validation_start", self)
        boundaries = None if self._saving is None else self._boundaries
        try:
            with self._watching():
                means = dict(self._hooks.validate(boundaries, None))
        except GatherInterruptedError as cut:
            # Before the save: callbacks put the model's own weights back in place of averages.
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

    def _watching(self) -> AbstractContextManager[None]:
        return nullcontext() if self._watchdog is None else self._watchdog.watching()

    def _keeping_generators(self) -> ExitStack:
        """Return a context that restores the random generators at its end."""
        before = capture_rng_state(self._session.job.devices)
        stack = ExitStack()
        stack.callback(restore_rng_state, before)
        return stack

    def _log_loss(self) -> None:
        """Log this rank's mean loss since the last row."""
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
        """Save the state after ``done`` batches of the current or next epoch.

        Collectives: as in `Saving.save`, and before it the checks of parameters and optimizers.
        """
        saving = self._saving
        if saving is None:
            return
        if meter is not None:
            self._run_state.seconds = time.perf_counter() - self._began_epoch
            self._hooks.check_parameters()
            if self._session.data_size > 1:
                check_same_optimizers(self._session, self.optimizers)
        with nullcontext() if self._watchdog is None else self._watchdog.paused():
            self._send_checkpoint_of(lambda: saving.save(done, meter))
        self._warn_unsaved()

    def _send_checkpoint_of(self, save: Callable[[], None]) -> None:
        """Call ``save``, and send the event if a checkpoint became complete.

        That may be the previous one: a thread may write the files while the run continues.
        """
        saving = self._saving
        before = None if saving is None else saving.last
        save()
        if saving is not None and saving.last is not None and saving.last != before:
            self._logs.event("checkpoint", {"name": saving.last.name}, step=self.step, epoch=self.epoch)
            self._events.send("on_checkpoint_saved", self, Path(saving.last))

    def _interrupt(self, number: int) -> None:
        """End the run after a signal, once the last checkpoint is written.

        Collectives: as in `Saving.finish` and `SignalWatch.seconds_since`.
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
        # Not bound to a name: a cycle with this frame would keep the loader's workers alive, as
        # test_no_cycle_keeps_the_workers_that_a_loader_has_for_all_epochs shows.
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
