"""When something is due between two optimizer steps of a run, as all ranks agree on it."""

import math
import time

from torch import Tensor
from tp_core.errors import ConfigError
from tp_core.plugins import PreparedLoader

from tp_trainer._running._due_work import DueWork
from tp_trainer._running._signals import Answer

__all__ = ["Between"]


class Between(DueWork):
    """A run that looks, between two optimizer steps, at what is due."""

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

        On several ranks they agree one or two steps later, or at the end of the epoch; where steps take
        less than a tenth of a second, within that time.
        """
        self._wants_end = reason
        self._boundaries.call()

    def save(self) -> None:
        """Have a checkpoint written after this step; one rank's word is enough.

        Raises:
            ConfigError: The run writes no checkpoints.
        """
        if self._saving is None:
            msg = "save() needs a place for checkpoints: give fit() or loop() checkpoint=folder"
            raise ConfigError(msg)
        self._wants_save = True
        self._boundaries.call()

    def log(self, **numbers: float | Tensor) -> None:
        """Log numbers of this step; tensors stay on their device until they are read, many together.

        In a custom loop their means over the epoch are in its record.

        Raises:
            StepError: A value is not a number.
        """
        if self._duties.counts:
            self.meter.log(numbers)
        step = self.step + (self._is_in_step and not self._is_over)
        self._logs.add(numbers, step=step, epoch=self.epoch)

    def _batch_after(self, more: int) -> int:
        """Return how many batches are done when ``more`` further optimizer steps are."""
        return min((self._done // self._accumulate + more) * self._accumulate, self._steps)

    def _tell_step_end(self) -> None:
        """Tell of an optimizer step that was made: in every step where somebody wants to know, so no more."""
        self._run_state.step, self._is_in_step = self.step, False
        self._events.send("on_step_end", self)
        self._is_in_step = True

    def _between(self, done: int, *, ended_step: bool = False) -> float:
        """Do what is due between two optimizer steps; return at how many batches to look again."""
        limits, ticker, steps = self._limits, self._ticker, self._steps
        if time.monotonic() >= ticker.next_update:
            ticker.update(done, self.meter.last_loss)
        step, wants = self.step, [math.inf]
        self._run_state.step, self._is_in_step = step, False
        if self._logs.is_on:
            if ended_step and step % self._logs.every == 0:
                self._log_loss()
                self._logs.flush()
            wants.append(self._batch_after(self._logs.every - step % self._logs.every))
        if limits.val_every_steps is not None:
            every = limits.val_every_steps
            if done and done < steps and step % every == 0 and self._run_state.validated_at != step:
                self._validate(done)
                self._logs.flush()
            wants.append(self._batch_after(every - step % every))
        if limits.max_steps is not None:
            if step >= limits.max_steps:
                self._ending = f"max_steps={limits.max_steps}"
            wants.append(self._batch_after(max(limits.max_steps - step, 1)))
        answer = self._ask(at_epoch=not ended_step)
        if answer.stop is not None:
            self._ending = answer.stop
        if self._saving is not None:
            left = self._saving.checkpointer.steps_left(step)
            is_due = answer.is_due or answer.save or self._saving.checkpointer.is_due(step)
            self._save_if(done, is_due=is_due, signalled=answer.signal)
            if left is not None:
                wants.append(self._batch_after(left))
        self._due_at = self._next_due()
        # On several ranks a thread looks at that: it is not for one rank to ask.
        self._wake_at = min(ticker.next_update, self._due_at if self.world_size == 1 else math.inf)
        self._is_in_step = True
        return min(wants)

    def _ask(self, *, at_epoch: bool) -> Answer:
        """Return what the ranks agree on, if they ask each other now; at epochs they do without a reason."""
        boundaries = self._boundaries
        if not self._asks or not (at_epoch or boundaries.is_meeting()):
            return Answer(0, False, None, False)
        saving, now = self._saving, time.monotonic()
        end = self._wants_end or (f"max_time={self._limits.max_time}" if now >= self._ends_at else None)
        is_old = saving is not None and self._done > 0 and now >= saving.checkpointer.due_at
        self._due_at = math.inf  # it has been asked for: what is due will be done before it is due again
        answer = self._signals.ask(due=is_old, stop=end, save=self._wants_save)
        self._wants_save = False
        if not at_epoch:
            boundaries.has_met()
        return answer

    def _next_due(self) -> float:
        """Return when the clock gives a reason to ask, by `time.monotonic`; rank 0's alone counts."""
        saving = self._saving
        return min(self._ends_at, math.inf if saving is None else saving.checkpointer.due_at)

    def _save_if(self, done: int, *, is_due: bool, signalled: int) -> None:
        if is_due and done == self._steps and not signalled:
            # After the validation, whose outcome may decide which checkpoint is the best.
            self._is_due = True
        elif is_due or signalled:
            self._save(done, self.meter)
        if signalled:
            self._interrupt(signalled)

    def _wants_to_agree(self) -> bool:
        return self.world_size == 1 or self._may_have_wishes()

    def _may_have_wishes(self) -> bool:
        """Whether anybody might call stop() or save()."""
        return self._duties.counts or bool(self._events.callbacks)
