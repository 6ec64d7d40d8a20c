"""What may be due between two optimizer steps of a run: to validate, save, log, or end."""

import logging
import math
import signal
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tp_core.plugins import PreparedLoader, Session

from tp_trainer._checkpoint import _generators as generators
from tp_trainer._metrics._metric import CutShortError
from tp_trainer._opening._agreement import check_same_optimizers
from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._running._duties import Duties, nothing
from tp_trainer._running._log import RunLog
from tp_trainer._running._lost_state import unsaved_averages, watching_optimizers
from tp_trainer._running._progress import Reporter, Ticker
from tp_trainer._running._saving import Saving
from tp_trainer._running._settings import LoopSettings
from tp_trainer._running._signals import SignalWatch, interrupted
from tp_trainer._running._state import RunState
from tp_trainer._running._view import RunFacts
from tp_trainer._running._watchdog import Watchdog
from tp_trainer._steps._meter import Meter

__all__ = ["DueWork"]

log = logging.getLogger("tp_trainer")


class DueWork(RunFacts):
    """A run with all that may be due in it; `Between` says when it is.

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
        self.ends_step = True
        self._next_call: float = 0  # at how many batches done to look at what is due
        self._wake_at = math.inf  # and at which time, of this rank's `time.monotonic`
        self._due_at = math.inf  # when max_time or the age of the last checkpoint wants a question
        self._wants_end: str | None = None  # this rank does
        self._wants_save = False
        self._ending: str | None = None  # all ranks know
        self._is_due = False
        self._is_over = self._is_open = self._is_in_step = False
        self._began_epoch = began = time.monotonic()
        limit_s = settings.limits.max_seconds
        self._ends_at = math.inf if limit_s is None else began + limit_s
        self._epoch_batches: Generator[Any, None, None] | None = None
        self._boundaries = StepBoundaries(session)
        self._signals = SignalWatch(session, self._boundaries, catches=self._saving is not None)
        self._asks = session.world_size == 1  # whether any rank may ever have something to ask
        self._open = ExitStack()
        self._tell_of_lost_state: Callable[[], None] = nothing

    def _has_wish(self) -> bool:
        """Whether this rank has something to ask the others, besides signals; called from a thread, too."""
        is_due = self.is_main and time.monotonic() >= self._due_at
        return is_due or self._wants_save or self._wants_end is not None

    def _save(self, done: int, meter: Meter | None) -> None:
        """Save the state after ``done`` batches of the epoch that begins or runs."""
        saving = self._saving
        if saving is None:
            return
        if meter is not None:
            self._run_state.seconds = time.perf_counter() - self._began_epoch
            self._duties.check()
            check_same_optimizers(self._session, self.optimizers)
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
            "seconds": round(self._signals.seconds_since(), 3),
        }
        self._logs.event("interruption", facts, step=self.step, epoch=self.epoch)
        self._events.send("on_interruption", self, number)
        # Raised from no variable: in a cycle with this frame it would keep the loader's workers alive.
        raise interrupted(number, self._session, step=self.step, saved=saved)

    def _validate(self, done: int) -> dict[str, float]:
        """Validate, and note the outcome, which the loggers are yet to be handed.

        A signal that comes meanwhile, to any rank, ends the run as it was before.
        """
        if self._duties.validate is None:
            return {}
        self._events.send("on_validation_start", self)

        boundaries = None if self._saving is None else self._boundaries
        try:
            with self._watchdog.watching():
                found = dict(self._duties.validate(boundaries, None))
        except CutShortError as cut:
            # What callbacks have put in the place of the model's weights is not to be saved.
            self._events.send("on_validation_end", self, {})
            self._save(done, self.meter)
            self._interrupt(cut.signal)
        self._boundaries.begin_phase(evaluates=False)
        state = self._run_state
        state.validated_at = self.step
        state.metrics = {
            **{name: value for name, value in state.metrics.items() if not name.startswith("val_")},
            **{f"val_{name}": value for name, value in found.items()},
        }
        numbers = {f"val_{name}": value for name, value in found.items()}
        self._logs.add(numbers, step=self.step, epoch=self.epoch)
        self._events.send("on_validation_end", self, found)
        return found

    def _try_validation(self) -> None:
        """Validate on a few batches before the first step, for what fails to fail now."""
        validate, most = self._duties.validate, self._limits.sanity_val_batches
        if most and validate is not None and not self._run_state.step:
            with self._without_trace(), self._watchdog.watching():
                validate(None, most)

    def _without_trace(self) -> ExitStack:
        """Return a context after which the random generators are where they were."""
        kept = generators.capture(self._session.job.devices)
        stack = ExitStack()
        stack.callback(generators.restore, kept)
        return stack

    def _new_meter(self) -> Meter:
        return Meter(
            self._session,
            first_step=(self.epoch - 1) * self._steps + 1,
            tolerate=self._duties.tolerates,
            weighs=self._run_state.weighs,
        )

    def _log_loss(self) -> None:
        """Log the mean loss of the steps since the last time, of this rank's samples."""
        if self._duties.counts:
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

    def _log_now(self, numbers: Mapping[str, float]) -> None:
        self._logs.add(numbers, step=self.step, epoch=self.epoch)
        self._logs.flush()
