"""Requests to end a run or to save it between two steps, and the agreement of all ranks on them."""

import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tp_core.plugins import Session

from tp_trainer._checkpoint._checkpointer import Checkpointer
from tp_trainer._opening._boundaries import Decision, SignalWatch, StepBoundaries
from tp_trainer._running._settings import Limits, seconds_of


class Requests:
    """Collects this rank's requests: of signals, of ``stop()`` and ``save()``, of the clock.

    Args:
        session: The session of the run.
        limits: The limits of the run.
        checkpointer: Writes the run's checkpoints; ``None`` if the run writes none.
        may_come: Whether anything may call :meth:`stop` or :meth:`save`. It stays as it is for the whole run:
            a self-joined callback that fails is left out on its rank alone, and a rank that asked no longer
            would leave the others waiting.

    Attributes:
        boundaries: The step boundaries at which the ranks may meet.
        signals: Notes signals.
        wake_at: When this rank's clock next gives a reason to look, by `time.monotonic`.
    """

    def __init__(
        self, session: Session, limits: Limits, checkpointer: Checkpointer | None, *, may_come: bool
    ) -> None:
        self._session = session
        self._max_time = limits.max_time
        self._ends_at = math.inf
        if limits.max_time is not None:
            self._ends_at = time.monotonic() + seconds_of(limits.max_time)
        self._checkpointer = checkpointer
        self.boundaries = StepBoundaries(session)
        self.signals = SignalWatch(session, self.boundaries, catches=checkpointer is not None)

        # What this rank asks for.
        self._stop_reason: str | None = None
        self._save_requested = False

        # Whether any rank may ever ask for something.
        self._is_alone = session.world_size == 1
        self._may_come = may_come
        self._can_ask = self._is_alone or may_come or checkpointer is not None or self._ends_at < math.inf

        # When max_time, or the age of the last checkpoint, gives a reason to ask.
        self._due_at = math.inf
        self.wake_at = math.inf

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Note signals and the other ranks' requests within the context.

        Collectives: as in `StepBoundaries.open`, if any rank may ask for something.
        """
        # Handlers are set before the thread of the boundaries starts, and removed after it has ended: a
        # signal in between would end the process unsaved.
        with self.signals:
            if not self._can_ask:
                yield
                return
            try:
                self.boundaries.open(self._has_any)
                yield
            finally:
                self.boundaries.close()

    def stop(self, reason: str) -> None:
        self._stop_reason = reason
        self.boundaries.call()

    def save(self) -> None:
        self._save_requested = True
        self.boundaries.call()

    def decide_between_steps(self, *, has_begun: bool) -> Decision:
        """Return the agreement of the ranks, if they meet at this boundary; else to do nothing.

        Args:
            has_begun: Whether a batch of this epoch is done, so that there is something to save.

        Collectives: as in `SignalWatch.decide`, if they meet.
        """
        if not self._can_ask or not self.boundaries.is_meeting():
            return Decision()
        decision = self._decide(has_begun=has_begun)
        self.boundaries.has_met()
        return decision

    def decide_before_epoch(self, *, has_begun: bool) -> Decision:
        """Return the agreement of the ranks before the first step of an epoch here, where they always meet.

        Collectives: as in `SignalWatch.decide`, if any rank may ask for something.
        """
        if self._can_ask:
            return self._decide(has_begun=has_begun)
        return Decision()

    def decide_after_epoch(self) -> Decision:
        """Return the agreement of the ranks after an epoch, where they always meet if calls may come.

        Collectives: as in `SignalWatch.decide`, if several ranks may call `stop` or `save`.
        """
        if not (self._is_alone or self._may_come):
            return Decision()
        return self._decide(has_begun=False)

    def _decide(self, *, has_begun: bool) -> Decision:
        now = time.monotonic()
        reason = self._stop_reason
        if reason is None and now >= self._ends_at:
            reason = f"max_time={self._max_time}"
        checkpointer = self._checkpointer
        is_old = checkpointer is not None and has_begun and now >= checkpointer.due_at
        self._due_at = math.inf  # asked for now; `schedule` sets it again
        decision = self.signals.decide(due=is_old, stop=reason, save=self._save_requested)
        self._save_requested = False
        return decision

    def schedule(self, shows_at: float) -> None:
        """Set the next look by the clock, with ``shows_at`` for the progress."""
        self._due_at = self._ends_at
        if self._checkpointer is not None:
            self._due_at = min(self._due_at, self._checkpointer.due_at)
        # With several ranks the boundaries' thread reads the clock of rank 0: a rank that asked by its own
        # would ask alone, as test_ranks_save_and_end_by_the_clock_of_the_first shows.
        if self._is_alone:
            self.wake_at = min(shows_at, self._due_at)
        else:
            self.wake_at = shows_at

    def _has_any(self) -> bool:
        """Return whether this rank has a request, besides signals.

        The boundaries' thread calls it: it only reads, and reads each attribute once.
        """
        is_due = self._session.is_main and time.monotonic() >= self._due_at
        return is_due or self._save_requested or self._stop_reason is not None
