"""The boundary between two steps at which all ranks ask each other, agreed on beside the main threads.

::

    rank 0   a signal                     rank 1
       |     wakes the thread                |
       +---> round "3 open" in the store <---+ looked at ten times a second
       |     vote: the next boundary         |     the vote of each rank: the first boundary where
       v     that the main thread reaches    v     its main thread can still stop
    rank 0's thread: "3 0 118", the latest of all votes; each main thread waits at its own vote for it
       |                                     |
       +------- one question, by all, at boundary 118 of phase 0

No main thread exchanges anything until somebody has a reason, and the speed of steps plays no part.
"""

import logging
import threading
import time
from collections.abc import Callable
from itertools import count
from queue import Empty, SimpleQueue

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch does not say so
from tp_core.internal import rendezvous_store
from tp_core.plugins import Session

log = logging.getLogger("tp_trainer")

_LOOK_S = 0.1  # between two looks at whether another rank has a reason
_RANKS_PER_LOOK_S = 10_000  # the store answers so many a second with a small part of one core
_ANSWER_S = 0.005  # between two looks at an open round, for which main threads may wait
_OPEN_S = 10.0  # how long a round is open; a rank that does not vote then is waited for in a collective
_CLOSED = "closed"

_runs = count()


class StepBoundaries:
    """Counts the boundaries between steps, and finds one at which all ranks ask each other.

    In one process every boundary is such a one. On several ranks a thread beside the main one votes
    for the next boundary that the main thread reaches, when a rank has a reason; all ask at the latest
    boundary that was voted for. No rank has passed it, since each waits at its own vote until it knows.

    Evaluations have boundaries between batches, of which ranks may have different numbers: each
    evaluation is a phase of its own, and so is the training before and after it.

    Args:
        session: Whose ranks they are.

    Attributes:
        passed: How many boundaries of the phase the main thread has reached; it counts them.
        calls: Whether the main thread is to look at :meth:`is_meeting`.
        seen: The signal that this rank has seen, or 0.
        seen_at: When it was seen, by `time.monotonic`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_alone = session.world_size == 1
        self.passed = 0
        self.calls = False
        self.seen, self.seen_at = 0, 0.0
        self._phase, self._evaluates = 0, False
        self._lock = threading.Lock()
        self._at: tuple[int, int] | None = None  # (phase, passed): where the main thread waits, or asks
        self._is_decided = threading.Event()
        # A signal handler may come while the main thread is anywhere, in a lock too: to put something into
        # this queue is reentrant, which an Event and a Queue are not.
        self._reasons: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def open(self, wishes: Callable[[], bool]) -> None:
        """Start the thread, if there are several ranks.

        Args:
            wishes: Returns whether this rank has a reason besides a signal; asked in the thread, in training.
                Not kept: it is the run's, which has this object and the loader, and in a cycle would keep
                the loader's workers alive.

        Collectives: one broadcast, if there are several ranks.
        """
        if self._is_alone:
            return
        environment = self._session.job.environment
        if environment.world_size != self._session.world_size or environment.master_address is None:
            # A backend that found its ranks by itself: without a store they ask at every boundary.
            self.calls = True
            return
        # Rank 0's number: a run that failed on some ranks alone leaves their counts apart.
        name = f"tp/boundaries/{self._session.broadcast(next(_runs))}"
        # A connection of its own: the main thread may wait in the other one, holding its lock, for a rank
        # that waits for this one's vote.
        store = PrefixStore(name, rendezvous_store(environment).clone())  # type: ignore[attr-defined]  # no stub
        self._thread = threading.Thread(
            target=self._run, args=(store, wishes), name="tp-step-boundaries", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread, which must not come back from the store into an interpreter that ends."""
        self._is_closing = True
        self._reasons.put(None)
        if self._thread is not None:
            self._thread.join(_OPEN_S)
            self._thread = None

    def note(self, number: int) -> None:
        """Note a signal; called from its handler."""
        if not self.seen:
            self.seen, self.seen_at = number, time.monotonic()
        self.call()

    def call(self) -> None:
        """Have the ranks ask each other soon, since this one has a reason."""
        if self._is_alone:
            self.calls = True
        else:
            self._reasons.put(None)

    def begin_phase(self, *, evaluates: bool) -> None:
        """Count from 0 again: what comes has other boundaries. To be called on all ranks alike."""
        with self._lock:  # a vote is of one phase
            self._phase, self.passed, self._evaluates = self._phase + 1, 0, evaluates

    def is_meeting(self) -> bool:
        """Whether all ranks ask each other at the boundary that the main thread has reached.

        It waits, if this rank has voted for this boundary, until the other ranks have voted too.
        """
        if self._is_alone:
            self.calls = False
            return True
        if self._thread is None:
            return self.calls
        here = (self._phase, self.passed)
        with self._lock:  # the thread may be about to vote
            if self._at is None or here < self._at:
                return False
        while not self._is_decided.wait(_OPEN_S) and self._thread.is_alive():
            pass
        with self._lock:
            if self._at is None or here < self._at:
                return False
            if self._at[0] == self._phase:
                return True
            # That phase ended before its boundary of this number, on all ranks.
            self._at, self.calls = None, False
            return False

    def has_met(self) -> None:
        """Note that all ranks have asked each other where :meth:`is_meeting` was true.

        Not before: a rank that waits for the others there must open no round, in which they would vote
        for another boundary.
        """
        with self._lock:  # the thread may have voted since, for a later boundary
            if self._at is not None and self._at <= (self._phase, self.passed):
                self._at, self.calls = None, False

    # -- the thread -----------------------------------------------------------------------------

    def _run(self, store: Store, wishes: Callable[[], bool]) -> None:
        rank = self._session.rank
        look_s = max(_LOOK_S, self._session.world_size / _RANKS_PER_LOOK_S)
        try:
            store.set(f"vote/{rank}", "0")
            store.compare_set("round", "", "0 void")
            while not self._is_closing and not self._take_part(store, wishes):
                try:
                    self._reasons.get(timeout=look_s)
                except Empty:
                    continue
            store.set(f"vote/{rank}", _CLOSED)
        except RuntimeError as error:
            if not self._is_closing:
                log.warning(
                    "the launcher's store was lost: signals, stop() and save() are noticed at the end of an "
                    "epoch alone (%s)",
                    error,
                )

    def _take_part(self, store: Store, wishes: Callable[[], bool]) -> bool:
        """Open a round if there is a reason, and take part in an open one; return whether all are over."""
        text = store.get("round").decode()
        number, state = text.split(" ", 1)
        if state == _CLOSED:
            return True
        # No round before the last one's question was asked: each rank has then seen where that was.
        has_reason = self._at is None and (self.seen or (not self._evaluates and wishes()))
        if state != "open" and has_reason:
            text = store.compare_set("round", text, f"{int(number) + 1} open").decode()
        if text.endswith(" open"):
            self._vote(store, text)
        return False

    def _vote(self, store: Store, text: str) -> None:
        """Vote in an open round, and let the main thread know its outcome."""
        number, _ = text.split(" ")
        with self._lock:
            self._is_decided.clear()
            # First the flag, then the count, while the main thread first counts and then looks at the flag:
            # one that has not seen the flag is counted, so it has not passed what is voted for here.
            self.calls = True
            self._at = phase, passed = self._phase, self.passed + 1
        decided: tuple[int, int] | None = None
        try:
            store.set(f"vote/{self._session.rank}", f"{number} {phase} {passed}")
            deadline = time.monotonic() + _OPEN_S
            while (now := store.get("round").decode()) == text:
                if self._is_closing:
                    outcome: str | None = _CLOSED
                elif time.monotonic() > deadline:
                    outcome = "void"
                else:
                    outcome = self._outcome(store, number) if self._session.is_main else None
                if outcome is None:
                    time.sleep(_ANSWER_S)
                else:  # the first word on a round is the last one: it may be another rank's
                    store.compare_set("round", text, f"{number} {outcome}")
            about, *where = now.split(" ")
            if about == number and len(where) == 2:
                decided = int(where[0]), int(where[1])
        finally:
            with self._lock:
                self._at, self.calls = decided, decided is not None
            self._is_decided.set()

    def _outcome(self, store: Store, number: str) -> str | None:
        """Return the latest boundary that was voted for, once all ranks have voted."""
        names = [f"vote/{rank}" for rank in range(self._session.world_size)]
        if not store.check(names):  # a rank whose run is about to begin
            return None
        votes = [vote.decode().split(" ") for vote in store.multi_get(names)]
        if [_CLOSED] in votes:
            return _CLOSED
        if any(vote[0] != number for vote in votes):
            return None
        phase, passed = max((int(phase), int(passed)) for _, phase, passed in votes)
        return f"{phase} {passed}"
