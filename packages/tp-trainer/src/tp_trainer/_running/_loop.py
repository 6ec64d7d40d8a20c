"""The loop over batches under every run: between two batches it does all that a run needs."""

import logging
import math
import time
from collections.abc import Generator, Iterator
from itertools import islice
from typing import Any, Self

from tp_core.errors import ConfigError, LoaderError
from tp_core.plugins import RunStatus

from tp_trainer._opening._agreement import check_same_optimizers
from tp_trainer._running._between import Between
from tp_trainer._running._history import EpochRecord
from tp_trainer._running._signals import Answer, Interrupted
from tp_trainer._steps._step import telling_of_ended_iterators

__all__ = ["Loop"]

log = logging.getLogger("tp_trainer")


class Loop(Between):
    """Goes over the batches of a run, and does between them all that a run needs.

    What :meth:`tp_trainer.Trainer.loop` returns, and what callbacks see of a run: a context manager, and an
    iterator over the batches of all epochs. Order and position, accumulation, limits, progress, signals,
    checkpoints and callbacks are its concern; what is done with a batch is that of the ``for``.
    """

    _has_told_of_more = False

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
                first = state.first
                self._reporter.say(
                    f"resumed from {saving.last}: epoch {state.epoch}, {first} batches of it done"
                )
        self._base = state.step - (state.first // self._accumulate)
        self._done = state.first
        self._asks = self._asks or saving is not None or self._ends_at < math.inf or self._may_have_wishes()
        open_.enter_context(self._signals)
        if self._asks:
            open_.callback(self._boundaries.close)
            self._boundaries.open(self._has_wish)
        if saving is not None:
            self._watch_for_lost_state()
        if self._duties.during is not None:
            open_.enter_context(self._duties.during(self))
        self._try_validation()
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
        with telling_of_ended_iterators():
            while not self._has_ended():
                self._begin_epoch()
                self._epoch_batches = self._batches()
                yield self._epoch_batches
                if not self._is_over:
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
                self._saved(self._saving.finish)
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
        self._is_over = False
        if not state.first:
            self._events.send("on_epoch_start", self)

    def _batches(self) -> Generator[Any, None, None]:
        """Yield the batches of an epoch: the hot path, where nothing is that a step does not need."""
        steps, accumulate, first = self._steps, self._accumulate, self._run_state.first
        note_step = self._watchdog.note_step if self._watchdog.is_on else None
        count = self.meter.count if self._duties.counts else None
        tells, boundaries, now = self._events.has("on_step_end"), self._boundaries, time.monotonic
        done = first
        shown = self._reporter.epoch(self.epoch, steps, first=first)
        with telling_of_ended_iterators(), shown as self._ticker, self._watchdog.watching():
            self._next_call = self._between(done)
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
                        if tells and self.ends_step:
                            self._tell_step_end()
                        if self.ends_step:
                            boundaries.passed += 1  # before the look at the flag: the thread relies on it
                            if boundaries.calls or done >= self._next_call or now() >= self._wake_at:
                                self._next_call = self._between(done, ended_step=True)
                                if self._ending is not None:
                                    break
                    if done == steps and not self._has_told_of_more:
                        self._tell_of_more()
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
        self._is_over = True

    def _tell_of_more(self) -> None:
        """Point out that a loader has more batches than its length says, by which the epochs were cut."""
        limits = self._limits
        if limits.steps_per_epoch is not None or limits.overfit_batches is not None:
            self._has_told_of_more = True  # nobody took its word for it
        elif self._train.has_more():
            self._has_told_of_more = True
            log.warning(
                "the loader has more than the %d batches that its len() said when the run began, and each "
                "epoch ends after %d of them; correct its __len__(), or give steps_per_epoch=",
                self._steps,
                self._steps,
            )

    # -- the ends of epochs ---------------------------------------------------------------------

    def _record(self) -> EpochRecord:
        """Return the record of the epoch, having validated."""
        state = self._run_state
        state.weighs, state.seconds = self.meter.weighs, 0.0
        seconds = time.perf_counter() - self._began_epoch
        optimizer = next(iter(self.optimizers.values()), None)
        rate = math.nan if optimizer is None else float(optimizer.param_groups[0]["lr"])
        if self._logs.is_on:
            self._log_loss()  # of the steps of this epoch that no row has yet
        found = self._validate(self._done)
        train = self.meter.means()  # only now: with it the meter has what all ranks have counted
        state.metrics = train | {f"val_{name}": value for name, value in found.items()}
        record = EpochRecord(self.epoch, self.step, self.meter.samples, seconds, rate, train, found)
        means = {f"epoch_{name}": value for name, value in train.items()}
        self._log_now({**means, "learning_rate": rate, "epoch_samples_per_s": record.samples_per_s})
        return record

    def _end_epoch(self) -> None:
        state, duties, saving = self._run_state, self._duties, self._saving
        duties.check()
        state.step = self.step
        record = self._record()
        duties.advance(record.train, record.val)
        state.records.append(record)
        self._reporter.done(record)
        duties.after_epoch()
        self._events.send("on_epoch_end", self)
        check_same_optimizers(self._session, self.optimizers)  # which a scheduler or a callback has moved
        base = self.step
        state.epoch, state.first = state.epoch + 1, 0
        self._base, self._done = base, 0
        answer = self._ask(at_epoch=True) if self._wants_to_agree() else Answer(0, False, None, False)
        self._ending = self._ending or answer.stop
        if saving is not None:
            if self._is_due or answer.save or saving.ends_epoch(state.epoch - 1) or self._has_ended():
                self._is_due = False
                self._save(0, None)
            saving.check_best()
            if answer.signal:
                self._save(0, None)
                self._interrupt(answer.signal)

    def _cut_epoch(self) -> None:
        """End the run within an epoch: saved as it stands, with a record of what was done of it."""
        state, done = self._run_state, self._done
        if done == state.first and state.records:
            return
        seconds = time.perf_counter() - self._began_epoch
        meter_state, logged = self.meter.state_dict(), state.logged
        with self._without_trace():
            self._duties.check()
            record = self._record()
        self.meter.load_state_dict(meter_state)
        state.logged = logged
        state.seconds = seconds
        self._save(done, self.meter)
        state.records.append(record)
        self._reporter.done(record)


def _status(error: BaseException | None) -> RunStatus:
    if error is None:
        return "finished"
    return "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
