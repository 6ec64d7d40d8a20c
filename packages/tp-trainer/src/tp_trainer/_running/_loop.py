"""The loop over batches of every run, with everything that happens between two batches."""

import math
import signal
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import chain, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from tp_core.arguments import explain_arguments
from tp_core.data import PreparedLoader
from tp_core.errors import ConfigError, LoaderError
from tp_core.output import StandardStream, get_logger
from tp_core.plugins import RunStatus, RunView, Session
from tp_core.random import capture_rng_state, preserve_rng_state, restore_rng_state

from tp_trainer._checks import recognize_log
from tp_trainer._metrics import GatherInterruptedError
from tp_trainer._opening._agreement import check_same_optimizers
from tp_trainer._opening._boundaries import Interrupted, StepBoundaries, interrupted
from tp_trainer._peer_names import LOOP_ATTRIBUTES
from tp_trainer._running._drift import DriftWatch
from tp_trainer._running._epoch_timer import EpochTimer
from tp_trainer._running._history import EpochRecord, History
from tp_trainer._running._log import RunLog
from tp_trainer._running._position import Position, StepSchedule
from tp_trainer._running._progress import Reporter, Ticker
from tp_trainer._running._requests import Requests
from tp_trainer._running._settings import LoopSettings, batches_per_epoch
from tp_trainer._running._state import (
    Captured,
    RunState,
    Saving,
    unsaved_optimizers,
)
from tp_trainer._steps._meter import Meter
from tp_trainer._steps._optimizer_step import OptimizerStep, learning_rate_of
from tp_trainer._steps._step import guard_stop_iteration
from tp_trainer.callbacks._early_stopping import EarlyStopping

if TYPE_CHECKING:
    from tp_trainer._running._watchdog import Watchdog


log = get_logger("tp_trainer")

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

    def validation_names(self, wanted: set[str]) -> set[str] | None:  # noqa: ARG002 - for overrides
        """Return the names of the validation's results, or those wanted if all are there, if known."""
        return None

    def check_parameters(self) -> None:
        """Raise if the parameters must not be saved, as after a step with NaN."""

    def step_schedulers(self, train: Mapping[str, float], val: Mapping[str, float]) -> None:
        """Step the schedulers that step once per epoch, given the means of training and validation."""

    def metric_checks(self) -> dict[str, Callable[[Iterable[str]], None]]:
        """Return the checks of metrics that decide something, each by the name among those that are known."""
        return {}

    def facts(self) -> dict[str, object]:
        """Return what all ranks must have been given equal, beside the facts of the loop."""
        return {}

    def note_save(self, step: int) -> None:
        """Warn of what the checkpoint of a step leaves out."""

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
        checkpoints, limits, validation = settings.checkpoint, settings.limits, settings.validation
        self._session = session
        self._settings = settings
        self._run_state = state
        self._train = train
        self._hooks = hooks
        self._logs = logs
        self._watchdog = watchdog
        if checkpoints is None:
            self._saving = None
        else:
            self._saving = Saving(checkpoints, session, state, settings.backend)
        shows = session.is_main and settings.progress is not False
        self._reporter = Reporter(progress=settings.progress) if shows else None
        self.state = settings.state

        # Where the run is.
        self._position = Position(steps, session.job.accumulate)
        self._timer = EpochTimer(session, train)
        self.meter = self._new_meter()
        self._ticker: Ticker | None = None  # of the epoch under way
        self._epoch_batches: Generator[Any, None, None] | None = None
        self._epoch_is_over = False
        self._is_over = False
        self._looked_for_more = False  # whether the loader has more batches than it says

        # What comes next, and what ends the run.
        log_every = logs.every if logs.is_on else None
        if validation is None:
            validate_every = None
        else:
            validate_every = validation.every_steps
        if checkpoints is None:
            save_every = None
        else:
            save_every = checkpoints.every_steps
        self._schedule = StepSchedule(
            log_every=log_every,
            validate_every=validate_every,
            save_every=save_every,
            last_step=limits.max_steps,
        )
        if self._saving is None:
            checkpointer = None
        else:
            checkpointer = self._saving.checkpointer
        self._drift = DriftWatch(session, state.trained.prepared)
        self._requests = Requests(
            session,
            limits,
            checkpointer,
            may_come=hooks.counts_batches or bool(settings.events.callbacks),
        )
        self._ending: str | None = None
        self._saves_at_epoch_end = False

        self._is_open = False
        self._open = ExitStack()
        self._warn_unsaved: Callable[[], None] = lambda: None

    # -- properties of the run, for callbacks and custom loops ----------------------------------

    @property
    def step(self) -> int:
        """Optimizer steps made so far, over all epochs, those before a resume included."""
        return self._position.step

    @property
    def epoch(self) -> int:
        """The current epoch, from 1."""
        return self._run_state.epoch

    @property
    def epochs(self) -> int | None:
        """The number of epochs; ``None`` if another limit ends the run."""
        return self._settings.limits.epochs

    @property
    def steps_per_epoch(self) -> int:
        """The number of batches in an epoch."""
        return self._position.batches

    @property
    def batches_done(self) -> int:
        """Batches of this epoch that are done."""
        return self._position.done

    @property
    def ends_step(self) -> bool:
        """Whether this batch is the last of an optimizer step."""
        return self._position.ends_step

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
        checkpoints = self._settings.checkpoint
        if checkpoints is None:
            folder = None
        else:
            folder = Path(checkpoints.folder).absolute()
        return History(tuple(self._run_state.records), folder)

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

    if not TYPE_CHECKING:  # a type checker would take every attribute for one that exists

        def __getattr__(self, name: str) -> Any:
            if name not in LOOP_ATTRIBUTES:
                return object.__getattribute__(self, name)  # raises the error that led here
            msg = f"a Loop has no {name!r}; write {LOOP_ATTRIBUTES[name]}"
            raise AttributeError(msg, name=name, obj=self)

        def __setattr__(self, name: str, value: object) -> None:  # for no name that each step sets
            if name in LOOP_ATTRIBUTES:
                msg = f"a Loop has no {name!r} to set; write {LOOP_ATTRIBUTES[name]}"
                raise AttributeError(msg, name=name, obj=self)
            object.__setattr__(self, name, value)

    # -- requests of callbacks and custom loops -------------------------------------------------

    @explain_arguments('loop.stop("a reason")')
    def stop(self, reason: str) -> None:
        """End the run after this step, with a checkpoint if the run writes any; one rank may call it.

        Several ranks agree one or two steps later, or at the end of the epoch. If steps take less than a
        tenth of a second, they agree within that time.
        """
        self._requests.stop(reason)

    @explain_arguments("loop.save()")
    def save(self) -> None:
        """Write a checkpoint after this step; one rank may call it.

        Raises:
            ConfigError: The run writes no checkpoints.
        """
        if self._saving is None:
            msg = "save() needs a place for checkpoints: give fit() or loop() checkpoint=folder"
            raise ConfigError(msg)
        self._requests.save()

    @explain_arguments("loop.log(loss=loss)", recognize=recognize_log)
    def log(self, **numbers: float | Tensor) -> None:
        """Log numbers of this step. Tensors stay on their device, and many are read together.

        In a custom loop the epoch's record has their means.

        Raises:
            StepError: A value is not a number.
        """
        if self._hooks.counts_batches:
            self.meter.log(numbers, self._position.share)
        is_of_next_step = self._position.is_in_step and not self._epoch_is_over
        self._logs.add(numbers, step=self.step + is_of_next_step, epoch=self.epoch)

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
                if self.epochs is not None and state.epoch > self.epochs:
                    self._say(f"nothing is left to do: {len(state.records)} of {self.epochs} epochs are done")
            if words := state.note_frozen():
                self._say(words)
        self._position.resume(state.step, state.first)
        open_.enter_context(self._session.states_following(state.user_state.averages))
        open_.enter_context(self._requests.noted())
        if saving is not None:
            self._warn_unsaved = open_.enter_context(unsaved_optimizers(self.optimizers.values()))
        open_.enter_context(self._hooks.while_open(self))
        if self._watchdog is not None:
            self._watchdog.connect(self._session)
        validation = self._settings.validation
        if validation is None:
            max_batches = 0
        else:
            max_batches = validation.sanity_batches
        if max_batches and not state.step:
            # A validation that fails must fail now, and not after an epoch of hours.
            with preserve_rng_state(), self._watching():
                self._hooks.validate(None, max_batches)
        wanted = {name for name in self._metrics_in_use() if name.startswith("val_")}
        if wanted and not state.step:
            # A typo must be found now, too.
            with preserve_rng_state(), self._watching():
                known = self._hooks.validation_names(wanted)
            if known is not None:
                self._check_metrics(wanted, known)
        self._logs.open(resumed=bool(state.step or state.first), step=state.step, epoch=state.epoch)
        self._settings.events.send("on_fit_start", self)

    def _metrics_in_use(self) -> dict[str, Callable[[Iterable[str]], None]]:
        """Return the names of the metrics that decide something, and the check of each among those known."""
        # Not of subclasses, which may look at numbers of their own.
        stoppings = [c for c in self._settings.events.callbacks if type(c) is EarlyStopping]
        checks = self._hooks.metric_checks()
        checks |= {stopping.metric: stopping._check_known for stopping in stoppings}
        saving = self._saving
        if saving is not None and saving.checkpointer.settings.best is not None:
            checks[saving.checkpointer.settings.best] = saving.check_best
        return checks

    def _check_metrics(self, names: Iterable[str], known: Iterable[str]) -> None:
        checks = self._metrics_in_use()
        for name in sorted(names):
            checks[name](sorted(known))

    def _check_training_metrics(self, known: set[str]) -> None:
        """Check, after the first step, the names of training metrics that decide something.

        Raises:
            ConfigError: The step's output has none of that name.
        """
        self._check_metrics({name for name in self._metrics_in_use() if not name.startswith("val_")}, known)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        try:
            # Ends the loader's iteration and the watchdog's thread now: a caught exception holds the frame.
            if self._epoch_batches is not None:
                self._epoch_batches.close()
            if error is not None and not isinstance(error, SystemExit | GeneratorExit):
                self._settings.events.send("on_exception", self, error)
        finally:
            self._logs.close(_status(error))
            self._is_open = False
            self._open.close()
        if isinstance(error, RuntimeError | AssertionError | IndexError):
            self._session.explain_error(error, self.models.values())

    # -- epochs and batches ---------------------------------------------------------------------

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches of all epochs."""
        return chain.from_iterable(self.by_epoch())

    def by_epoch(self) -> Iterator[Iterator[Any]]:
        """Yield an iterator over the batches of each epoch, for code between epochs.

        Raises:
            ConfigError: An epoch was left before its last batch; the loop is not in a ``with`` block; or it
                has yielded the batches of all epochs.
            LoaderError: In an epoch: the loader has fewer batches than its length.
        """
        if not self._is_open:
            msg = "a loop is used in a with block: with trainer.loop(...) as loop: for batch in loop: ..."
            raise ConfigError(msg)
        if self._is_over:
            msg = (
                "the loop has yielded its batches: `for batch in loop` goes over those of all epochs, and "
                "stands in no loop over epochs; for code between epochs write: for batches in loop.by_epoch()"
            )
            raise ConfigError(msg)
        with guard_stop_iteration():
            while not self._has_ended():
                self._begin_epoch()
                self._epoch_batches = self._batches()
                yield self._epoch_batches
                position = self._position
                if not self._epoch_is_over:
                    msg = (
                        f"epoch {self.epoch} was left after {position.done} of {position.batches} batches; "
                        "call stop() on the loop to end the run, or give Limits(steps_per_epoch=...)"
                    )
                    raise ConfigError(msg)
                if position.done < position.batches:
                    self._cut_epoch()
                else:
                    self._end_epoch()
            self._is_over = True
            if self._saving is not None:
                self._send_checkpoint_of(self._saving.finish)
            self._logs.flush()
            if self._ending is not None:
                self._say(f"ended after step {self.step}: {self._ending}")
            self._settings.events.send("on_fit_end", self)

    def _has_ended(self) -> bool:
        limits = self._settings.limits
        epochs, max_steps = limits.epochs, limits.max_steps
        if max_steps is not None and self.step >= max_steps and self._ending is None:
            self._ending = f"max_steps={max_steps}"
        return self._ending is not None or (epochs is not None and self.epoch > epochs)

    def _begin_epoch(self) -> None:
        state, limits, position = self._run_state, self._settings.limits, self._position
        if limits.overfit_batches is not None:
            self._train.set_epoch(0)
        if limits.steps_per_epoch is None and hasattr(self._train.loader, "batches_in"):
            position.batches = batches_per_epoch(self._train, limits)
        self._timer.begin(state.seconds)
        position.done = state.first
        self.meter = self._new_meter()
        if state.meter_state is not None:
            self.meter.load_state_dict(state.meter_state)
            state.meter_state = None
        if not state.first or state.logged is None:
            state.logged = self.meter.totals()
        self._epoch_is_over = False
        if not state.first:
            self._settings.events.send("on_epoch_start", self)

    def _new_meter(self) -> Meter:
        return Meter(
            self._session,
            first_step=(self.epoch - 1) * self._position.batches + 1,
            tolerate=self._hooks.skips_nonfinite,
            weighs=self._run_state.weighs,
        )

    def _batches(self) -> Generator[Any, None, None]:
        """Yield the batches of an epoch, and handle what is due between them.

        This is the hot path: attributes are bound to locals, and `_at_boundary` runs only when something is
        due.

        Collectives: as in `_at_boundary`.
        """
        position, requests, first = self._position, self._requests, self._run_state.first
        steps, accumulate = position.batches, position.accumulate
        if self._watchdog is None:
            note_step = None
        else:
            note_step = self._watchdog.note_step
        meter = self.meter if self._hooks.counts_batches else None
        events = self._settings.events
        sends_step_end = events.has("on_step_end")
        boundaries, now = requests.boundaries, time.monotonic
        done = first
        reporter = self._reporter
        shown = nullcontext() if reporter is None else reporter.epoch(self._epoch_label(), steps, first=first)
        with guard_stop_iteration(), shown as self._ticker, self._watching():
            next_look = self._at_boundary(done)  # at this many batches done
            if self._ending is None:
                train = self._train
                batches = iter(train)
                try:
                    for batch in islice(batches, steps - first):
                        # Now: the code of the step may iterate the loader, too.
                        share = position.share = train.share
                        if accumulate > 1:
                            position.ends_step = (done + 1) % accumulate == 0 or done + 1 == steps
                        if note_step is not None:
                            note_step()
                        yield batch
                        done += 1
                        position.done = done
                        if meter is not None:
                            meter.count(share)
                        if sends_step_end and position.ends_step:
                            self._run_state.step = position.step
                            position.is_in_step = False
                            events.send("on_step_end", self)
                            position.is_in_step = True
                        if position.ends_step:
                            # Before the flag is read: see `StepBoundaries._vote`, which relies on this order.
                            boundaries.passed += 1
                            if boundaries.calls or done >= next_look or now() >= requests.wake_at:
                                next_look = self._at_boundary(done, ended_step=True)
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
        limits = self._settings.limits
        if limits.steps_per_epoch is not None or limits.overfit_batches is not None:
            self._looked_for_more = True  # the user chose another length
        elif self._train.has_more():
            self._looked_for_more = True
            log.warning(
                "the loader has more than the %d batches that its len() said when the run began, and each "
                "epoch ends after %d of them; correct its __len__(), or give Limits(steps_per_epoch=...)",
                self._position.batches,
                self._position.batches,
            )

    # -- the step boundary, between two optimizer steps -----------------------------------------

    def _at_boundary(self, done: int, *, ended_step: bool = False) -> float:
        """Do what is due between two optimizer steps; return the number of batches at which to look again.

        Collectives: as in `Requests`, `_validate` and `_save`, where they are due. All ranks do the same, as
        limits are the same, and everything else is agreed on in `Requests`.
        """
        position, schedule = self._position, self._schedule
        step = self._run_state.step = position.step
        position.is_in_step = False
        self._show_progress(done)
        if ended_step and schedule.log_every is not None and step % schedule.log_every == 0:
            self._log_loss()
            self._logs.flush()
        self._validate_within_epoch(step)
        if schedule.last_step is not None and step >= schedule.last_step:
            self._ending = f"max_steps={schedule.last_step}"
        self._follow_requests(step, ended_step=ended_step)
        if self._ticker is None:
            next_update = math.inf
        else:
            next_update = self._ticker.next_update
        self._requests.schedule(next_update)
        position.is_in_step = True
        steps_left = schedule.next_after(step)
        if steps_left == math.inf:
            return steps_left
        return position.batches_after(int(steps_left))

    def _show_progress(self, done: int) -> None:
        ticker = self._ticker
        if ticker is None or time.monotonic() < ticker.next_update:
            return
        meter, seconds = self.meter, self._timer.seconds
        validated = {name: value for name, value in self.metrics.items() if name.startswith("val_")}
        ticker.update(
            done,
            meter.last_loss,
            self._timer.measured(),
            val=validated,
            # Of all ranks, as if each had as many as this one.
            samples_per_s=meter.samples * self._session.data_size / seconds,
        )

    def _validate_within_epoch(self, step: int) -> None:
        """Validate after as many steps as the user asked for, but at the end of an epoch, which does itself.

        Collectives: as in `_validate`, where it is due.
        """
        every, position = self._schedule.validate_every, self._position
        if every is None or step % every != 0 or self._run_state.validated_at == step:
            return
        if 0 < position.done < position.batches:
            self._validate(position.done)
            self._logs.flush()

    def _follow_requests(self, step: int, *, ended_step: bool) -> None:
        """End or save the run as the ranks agree, and save it where a checkpoint is due.

        Collectives: as in `Requests`; as in `_save`, where it is due.
        """
        position, requests, saving = self._position, self._requests, self._saving
        has_begun = position.done > 0
        if ended_step:
            decision = requests.decide_between_steps(has_begun=has_begun)
        else:
            decision = requests.decide_before_epoch(has_begun=has_begun)
        if decision.stop is not None:
            self._ending = decision.stop
        if saving is None:
            return
        is_due = decision.is_due or decision.save or saving.checkpointer.is_due(step)
        if is_due and position.done == position.batches and not decision.signal:
            # Not before the validation: its result may decide which checkpoint is the best.
            self._saves_at_epoch_end = True
        elif is_due or decision.signal:
            self._save(position.done, self.meter)
        if decision.signal:
            self._interrupt(decision.signal)

    # -- the ends of epochs ---------------------------------------------------------------------

    def _end_epoch(self) -> None:
        state, hooks, saving = self._run_state, self._hooks, self._saving
        hooks.check_parameters()
        state.step = self.step
        record = self._record()
        hooks.step_schedulers(record.train, record.val)
        state.records.append(record)
        self._say(f"{self._epoch_label()}  {record}")
        self._settings.events.send("on_epoch_end", self)
        self._compare_ranks()  # a scheduler or a callback may have changed what they have in common
        state.epoch += 1
        state.first = 0
        self._position.end_epoch()
        decision = self._requests.decide_after_epoch()
        self._ending = self._ending or decision.stop
        if saving is not None:
            is_due = self._saves_at_epoch_end or decision.save or saving.ends_epoch(state.epoch - 1)
            if is_due or self._has_ended():
                self._saves_at_epoch_end = False
                self._save(0, None)
            saving.check_best(state.metrics)
            if decision.signal:
                self._save(0, None)
                self._interrupt(decision.signal)

    def _cut_epoch(self) -> None:
        """End the run within an epoch: save it here, and record the part of the epoch that was done.

        Collectives: as in `_capture`, `_record` and `_write`.
        """
        state, done = self._run_state, self._position.done
        if done == state.first and state.records:
            return
        # The record changes the meter and validates, and callbacks count validations. Captured before, the
        # state has nothing of it: a resumed run goes through the rest of the epoch as an uninterrupted one
        # does. It is written after, as the metrics decide which checkpoint is the best.
        captured = self._capture(done, self.meter)
        with preserve_rng_state():
            self._hooks.check_parameters()
            record = self._record()
        self._write(captured)
        state.records.append(record)
        self._say(f"{self._epoch_label()}  {record}")

    def _record(self) -> EpochRecord:
        """Validate, and return the record of the epoch.

        Collectives: as in `_validate` and `Meter.means`.
        """
        state = self._run_state
        state.weighs, state.seconds = self.meter.weighs, 0.0
        seconds = self._timer.seconds
        data = self._timer.measured_everywhere()  # before the validation: its time does not count
        rate = self._learning_rate()
        if self._logs.is_on:
            self._log_loss()  # the steps since the last row
        val = self._validate(self._position.done)
        # After the validation, where a signal saves this rank's own sums: means() adds up all ranks' samples.
        train = self.meter.means()
        state.metrics = train | {f"val_{name}": value for name, value in val.items()}
        shown_rate = math.nan if rate is None else rate
        record = EpochRecord(self.epoch, self.step, self.meter.samples, seconds, shown_rate, train, val, data)
        numbers = {f"epoch_{name}": value for name, value in [*train.items(), *data.items()]}
        numbers["epoch_samples_per_s"] = record.samples_per_s
        if rate is not None:
            numbers["learning_rate"] = rate
        self._logs.add(numbers, step=self.step, epoch=self.epoch)
        self._logs.flush()
        return record

    def _learning_rate(self) -> float | None:
        """Return the rate of the first optimizer's first group, if there is one."""
        optimizer = next(iter(self.optimizers.values()), None)
        if optimizer is None:
            return None
        return learning_rate_of(optimizer.param_groups[0])

    def _epoch_label(self) -> str:
        epochs = self.epochs
        if epochs is None:
            return f"epoch {self.epoch}"
        return f"epoch {self.epoch}/{epochs}"

    def _say(self, line: str) -> None:
        log.info(line)
        if self._reporter is not None:
            # What the script has printed comes before, also where stdout is a file or a pipe.
            StandardStream("stdout").flush()
            self._reporter.say(line)

    # -- validation, logs, checkpoints, interruption --------------------------------------------

    def _validate(self, done: int) -> dict[str, float]:
        """Validate, and buffer the results for the loggers.

        If a rank gets a signal during it, the run ends with the state before the validation.

        Collectives: as in the validation's evaluations.
        """
        if self._settings.validation is None:
            return {}
        boundaries = self._requests.boundaries
        if self._saving is None:
            saving_boundaries = None
        else:
            saving_boundaries = boundaries
        # A validation may draw, and the run that is resumed begins it anew.
        devices = self._session.job.devices
        generators = capture_rng_state(devices)
        self._settings.events.send("on_validation_start", self)
        try:
            with self._watching():
                means = dict(self._hooks.validate(saving_boundaries, None))
        except GatherInterruptedError as cut:
            # Before the save: callbacks put the model's own weights back in place of averages.
            self._settings.events.send("on_validation_end", self, {})
            restore_rng_state(generators, devices)
            self._save(done, self.meter)
            self._interrupt(cut.signal)
        boundaries.begin_phase(evaluates=False)
        state = self._run_state
        state.validated_at = self.step
        numbers = {f"val_{name}": value for name, value in means.items()}
        trained = {name: value for name, value in state.metrics.items() if not name.startswith("val_")}
        state.metrics = trained | numbers
        self._logs.add(numbers, step=self.step, epoch=self.epoch)
        self._settings.events.send("on_validation_end", self, means)
        return means

    def _watching(self) -> AbstractContextManager[None]:
        if self._watchdog is None:
            return nullcontext()
        return self._watchdog.watching()

    def _log_loss(self) -> None:
        """Log this rank's mean loss since the last row."""
        if self._hooks.counts_batches:
            return
        losses, weight = self.meter.totals()
        before, self._run_state.logged = self._run_state.logged or (0.0, 0.0), (losses, weight)
        numbers = {}
        if weight > before[1]:
            numbers["loss"] = (losses - before[0]) / (weight - before[1])
        rate = self._learning_rate()
        if rate is not None:
            numbers["learning_rate"] = rate
        self._logs.add(numbers, step=self.step, epoch=self.epoch)

    def _save(self, done: int, meter: Meter | None) -> None:
        """Save the state after ``done`` batches of the current or next epoch.

        Collectives: as in `_capture` and `_write`.
        """
        self._write(self._capture(done, meter))

    def _capture(self, done: int, meter: Meter | None) -> Captured | None:
        """Return the state after ``done`` batches of the current or next epoch, if it is to be saved.

        Collectives: as in `Saving.capture`, and before it the checks of parameters and optimizers.
        """
        if self._saving is None:
            return None
        self._hooks.note_save(self.step)
        if meter is not None:
            self._run_state.seconds = self._timer.seconds
            self._hooks.check_parameters()
            self._compare_ranks()
        paused = nullcontext() if self._watchdog is None else self._watchdog.paused()
        with paused:
            return self._saving.capture(done, meter)

    def _compare_ranks(self) -> None:
        """Compare the settings of the ranks' optimizers, and the parameters that they hold in common.

        Raises:
            DisagreementError: Settings differ.

        Collectives: as in `Session.gather_objects`, on several ranks.
        """
        session, drift = self._session, self._drift
        if session.world_size > 1:
            everyones = check_same_optimizers(session, self.optimizers, beside=drift.sums())
            drift.compare(everyones, when=f"after step {self.step}")

    def _write(self, captured: Captured | None) -> None:
        """Write a captured state into a checkpoint.

        Collectives: as in `Saving.write`.
        """
        saving = self._saving
        if saving is None:
            return
        if captured is not None:
            paused = nullcontext() if self._watchdog is None else self._watchdog.paused()
            with paused:
                self._send_checkpoint_of(lambda: saving.write(captured))
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
            self._settings.events.send("on_checkpoint_saved", self, Path(saving.last))

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
            "seconds": round(self._requests.signals.seconds_since(), 3),
        }
        self._logs.event("interruption", facts, step=self.step, epoch=self.epoch)
        self._settings.events.send("on_interruption", self, number)
        # Not bound to a name: a cycle with this frame would keep the loader's workers alive, as
        # test_no_cycle_keeps_the_workers_that_a_loader_has_for_all_epochs shows.
        raise interrupted(number, self._session, self._requests.signals, step=self.step, saved=saved)


def _first(what: str, named: Mapping[str, T]) -> T:
    if not named:
        msg = f"the loop was given no {what}: name it in state={{...}}"
        raise ConfigError(msg)
    return next(iter(named.values()))


def _status(error: BaseException | None) -> RunStatus:
    if error is None:
        return "finished"
    if isinstance(error, Interrupted | KeyboardInterrupt):
        return "interrupted"
    return "failed"
