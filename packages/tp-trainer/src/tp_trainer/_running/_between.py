"""What a run does between two optimizer steps: it agrees, validates, saves, logs, and may end."""

import logging
import math
import signal
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor
from tp_core.errors import ConfigError
from tp_core.plugins import PreparedLoader, Session

from tp_trainer._checkpoint import _generators as generators
from tp_trainer._running._duties import Duties, nothing
from tp_trainer._running._log import RunLog
from tp_trainer._running._lost_state import unsaved_averages, watching_optimizers
from tp_trainer._running._progress import Reporter, Ticker
from tp_trainer._running._saving import Saving
from tp_trainer._running._settings import LoopSettings
from tp_trainer._running._signals import Answer, SignalWatch, interrupted, requeue
from tp_trainer._running._state import RunState
from tp_trainer._running._view import RunFacts
from tp_trainer._running._watchdog import Watchdog
from tp_trainer._steps._meter import Meter

__all__ = ["Between"]

log = logging.getLogger("tp_trainer")


class _CutShortError(Exception):
    """A signal has come in a validation."""


class Between(RunFacts):
    """What a run does between two optimizer steps.

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
        duties: Duties,
        logs: RunLog,
        steps: int,
        watchdog: Watchdog,
    ) -> None:
        checkpoints = settings.checkpoints()
        super().__init__(
            session,
            state,
            settings.limits,
            steps=steps,
            accumulate=settings.accumulate,
            folder=None if checkpoints is None else Path(checkpoints.folder).absolute(),
        )
        self._settings, self._train, self._duties, self._events = settings, train, duties, settings.events
        self._logs, self._watchdog = logs, watchdog
        self.state = settings.state
        self._reporter = Reporter(
            progress=settings.progress if session.is_main else False, epochs=settings.limits.epochs
        )
        self._saving = None if checkpoints is None else Saving(checkpoints, session, state, settings.backend)
        self._ticker = Ticker("", 0, math.inf)
        self.meter = self._new_meter()
        self._logged = (0.0, 0.0)  # the meter's totals when the loss was logged
        self.ends_step = True
        self._next_call: float = 0
        self._ask_at = 0.0
        self._wants_end: str | None = None  # this rank does
        self._wants_save = False
        self._ending: str | None = None  # all ranks know
        self._is_due = False
        self._is_over = self._is_open = self._is_in_step = False
        self._began = self._began_epoch = time.monotonic()
        self._epoch_batches: Generator[Any, None, None] | None = None
        self._signals: SignalWatch | None = None
        self._open = ExitStack()
        self._tell_of_lost_state: Callable[[], None] = nothing

    # -- what callbacks and own loops see -------------------------------------------------------

    @property
    def loader(self) -> PreparedLoader:
        """The prepared loader that is trained on."""
        return self._train

    @property
    def ending(self) -> str | None:
        """Why the run ends before its last epoch, or ``None``."""
        return self._ending

    def stop(self, reason: str) -> None:
        """End the run after this step, saved where checkpoints are written; one rank's word is enough.

        On several ranks they agree within half a second of steps, and at the end of an epoch at once.
        """
        self._wants_end = reason
        self._next_call = 0

    def save(self) -> None:
        """Have a checkpoint written after this step; one rank's word is enough.

        Raises:
            ConfigError: The run writes no checkpoints.
        """
        if self._saving is None:
            msg = "save() needs a place for checkpoints: give fit() or loop() checkpoint=folder"
            raise ConfigError(msg)
        self._wants_save = True
        self._next_call = 0

    def log(self, **numbers: float | Tensor) -> None:
        """Log numbers of this step; tensors stay on their device until they are read, many together.

        In a loop of one's own their means over the epoch are in its record.

        Raises:
            StepError: One is not a number.
        """
        if self._duties.counts:
            self.meter.log(numbers)
        step = self.step + (self._is_in_step and not self._is_over)
        self._logs.add(numbers, step=step, epoch=self.epoch)

    def _new_meter(self) -> Meter:
        return Meter(
            self._session,
            first_step=(self.epoch - 1) * self._steps + 1,
            tolerate=self._duties.tolerates,
            weighs=self._run_state.weighs,
        )

    # -- between two steps ----------------------------------------------------------------------

    def _batch_after(self, more: int) -> int:
        """Return how many batches are done when ``more`` further optimizer steps are."""
        return min((self._done // self._accumulate + more) * self._accumulate, self._steps)

    def _between(self, done: int, *, ended_step: bool = False) -> float:
        """Do what is due between two optimizer steps; return at how many batches to look again."""
        limits, ticker, events, steps = self._limits, self._ticker, self._events, self._steps
        if done >= ticker.next_update and done:
            ticker.update(done, self.meter.last_loss)
        step, wants = self.step, [math.inf, ticker.next_update]
        self._run_state.step, self._is_in_step = step, False
        if events.has("on_step_end"):
            if ended_step:
                events.send("on_step_end", self)
            wants.append(self._batch_after(1))
        if self._logs.is_on:
            if ended_step and step % self._logs.every == 0:
                self._log_loss()
            wants.append(self._batch_after(self._logs.every - step % self._logs.every))
        if limits.val_every_steps is not None:
            every = limits.val_every_steps
            if done and done < steps and step % every == 0 and self._run_state.validated_at != step:
                self._validate(done)
            wants.append(self._batch_after(every - step % every))
        if limits.max_steps is not None:
            if step >= limits.max_steps:
                self._ending = f"max_steps={limits.max_steps}"
            wants.append(self._batch_after(max(limits.max_steps - step, 1)))
        answer = self._ask(done)
        if self._signals is not None and self._ask_at > done:
            wants.append(self._ask_at)
        if answer.stop is not None:
            self._ending = answer.stop
        if self._saving is not None:
            left = self._saving.checkpointer.steps_left(step)
            is_due = answer.is_due or answer.save or self._saving.checkpointer.is_due(step)
            self._save_if(done, is_due=is_due, signalled=answer.signal)
            if left is not None:
                wants.append(self._batch_after(left))
        self._is_in_step = True
        return min(wants)

    def _ask(self, done: int) -> Answer:
        """Return what the ranks agree on, if it is time to ask; one rank need not wait for it."""
        signals, saving = self._signals, self._saving
        wishes = self._wants_end, self._wants_save
        answer = Answer(0, False, None, False)
        if signals is not None and done >= self._ask_at:
            end = self._wants_end or self._out_of_time()
            due = saving is not None and done > 0 and saving.checkpointer.is_old
            answer = signals.ask(due=due, stop=end, save=self._wants_save)
            self._wants_save = False
            self._ask_at = self._batch_after(signals.interval)
        elif self.world_size == 1:
            answer, self._wants_save = Answer(0, False, *wishes), False
        return answer

    def _out_of_time(self) -> str | None:
        limit = self._limits.max_seconds
        is_over = limit is not None and time.monotonic() - self._began >= limit
        return f"max_time={self._limits.max_time}" if is_over else None

    def _save_if(self, done: int, *, is_due: bool, signalled: int) -> None:
        if is_due and done == self._steps and not signalled:
            # After the validation, whose outcome may decide which checkpoint is the best.
            self._is_due = True
        elif is_due or signalled:
            self._save(done, self.meter)
        if signalled:
            self._interrupt(signalled)

    def _save(self, done: int, meter: Meter | None) -> None:
        """Save the state after ``done`` batches of the epoch that begins or runs."""
        saving = self._saving
        if saving is None:
            return
        if meter is not None:
            self._run_state.seconds = time.perf_counter() - self._began_epoch
            self._duties.check()
        with self._watchdog.paused():
            self._saved(lambda: saving.save(done, meter))
        self._tell_of_lost_state()

    def _watch_for_lost_state(self) -> None:
        """Point out state of known kinds that no checkpoint will have: now, or at the first checkpoint."""
        optimizers = self.optimizers.values()
        for words in unsaved_averages(optimizers, [*self.state.values(), *self.models.values()]):
            log.warning("no checkpoint will have %s: name it in state={...}", words)
        self._tell_of_lost_state = self._open.enter_context(watching_optimizers(optimizers))

    def _saved(self, save: Callable[[], None]) -> None:
        """Save, and tell of a checkpoint that is whole since."""
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
            self._saved(saving.finish)
            saved = saving.last
        facts = {
            "signal": signal.Signals(number).name,
            "saved": "nothing" if saved is None else saved.name,
        }
        self._logs.event("interruption", facts, step=self.step, epoch=self.epoch)
        self._events.send("on_interruption", self, number)
        end = interrupted(number, self._session, step=self.step, saved=saved)
        if number == signal.SIGUSR1 and self.is_main:
            requeue()
        raise end

    def _wants_to_agree(self) -> bool:
        return self.world_size == 1 or (self._signals is not None and self._has_wishes())

    def _has_wishes(self) -> bool:
        """Whether anybody might call stop() or save()."""
        return self._duties.counts or bool(self._events.callbacks)

    def _validate(self, done: int) -> dict[str, float]:
        """Validate, and note the outcome; a signal that comes meanwhile ends the run as it was before."""
        if self._duties.validate is None:
            return {}
        self._events.send("on_validation_start", self)

        signals = self._signals

        def between(batches: int) -> None:
            # Several ranks may have different numbers of batches, and ask each other afterwards.
            if signals is not None and signals.seen and self.world_size == 1 and batches:
                raise _CutShortError

        try:
            with self._watchdog.watching():
                found = dict(self._duties.validate(between, None))
        except _CutShortError:
            # What callbacks have put in the place of the model's weights is not to be saved.
            self._events.send("on_validation_end", self, {})
            self._save(done, self.meter)
            self._interrupt(0 if signals is None else signals.seen)
        state = self._run_state
        state.validated_at = self.step
        state.metrics = {
            **{name: value for name, value in state.metrics.items() if not name.startswith("val_")},
            **{f"val_{name}": value for name, value in found.items()},
        }
        self._log_now({f"val_{name}": value for name, value in found.items()})
        self._events.send("on_validation_end", self, found)
        return found

    def _try_validation(self) -> None:
        """Validate on a few batches before the first step, for what fails to fail now."""
        validate, most = self._duties.validate, self._limits.sanity_val_batches
        if most and validate is not None and not self._run_state.step:
            with self._without_trace(), self._watchdog.watching():
                validate(nothing, most)

    def _without_trace(self) -> ExitStack:
        """Return a context after which the random generators are where they were."""
        kept = generators.capture(self._session.job.devices)
        stack = ExitStack()
        stack.callback(generators.restore, kept)
        return stack

    # -- numbers for loggers --------------------------------------------------------------------

    def _log_loss(self) -> None:
        """Log the mean loss of the steps since the last time, of this rank's samples."""
        if not self._duties.counts:
            losses, weight = self.meter.totals()
            before, self._logged = self._logged, (losses, weight)
            numbers = {}
            if weight > before[1]:
                numbers["loss"] = (losses - before[0]) / (weight - before[1])
            optimizer = next(iter(self.optimizers.values()), None)
            if optimizer is not None:
                numbers["learning_rate"] = float(optimizer.param_groups[0]["lr"])
            self._logs.add(numbers, step=self.step, epoch=self.epoch)
        self._logs.flush()

    def _log_now(self, numbers: Mapping[str, float]) -> None:
        self._logs.add(numbers, step=self.step, epoch=self.epoch)
        self._logs.flush()
