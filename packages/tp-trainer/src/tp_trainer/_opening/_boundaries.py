"""The agreement on a boundary between two steps, at which all ranks exchange their requests.

::

    rank 0   a signal                     rank 1
       |     wakes the thread                |
       +---> round "3 open" in the store <---+ looked at five times a second
       |     vote: the next boundary         |     the vote of each rank: the first boundary where
       v     that the main thread reaches    v     its main thread can still stop
    rank 0's thread: "3 0 118", the latest of all votes; each main thread waits at its own vote for it
       |                                     |
       +------- one collective, of all ranks, at boundary 118 of phase 0

Threads vote through the store. No main thread makes a collective until a rank has a reason, and steps of any
speed are as fast as without this.
"""

import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from functools import cache
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from types import FrameType
from typing import Any, NamedTuple, Self

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]  # torch does not say so
from torch.utils.data import get_worker_info
from tp_core.launching import discard_closed_terminal, write_exit_report
from tp_core.output import get_logger
from tp_core.plugins import Session
from tp_core.sessions import rendezvous_store

log = get_logger("tp_trainer")

_LOOK_S = 0.2  # between two looks at the store, for a reason of another rank
_RANKS_PER_LOOK_S = 10_000  # queries per second that the store answers with a small part of one core
_ANSWER_S = 0.005  # between two looks at an open round, for which main threads may wait
_OPEN_S = 10.0  # how long a round stays open for all votes; then it is void
_CLOSED = "closed"

_runs = count()


class StepBoundaries:
    """Counts the boundaries between steps, and finds the one at which all ranks exchange their requests.

    In one process every boundary will do. With several ranks, each has a thread beside the main one. When a
    rank has a reason, each thread votes for the next boundary that its main thread reaches. The ranks meet at
    the latest boundary of all votes. No rank has passed it, since each waits at its own vote for the result.

    Evaluations have boundaries between batches, and ranks may have different numbers of batches. So each
    evaluation is a phase, and so is the training before and after it.

    Attributes:
        passed: The boundaries of the phase that the main thread has reached; the main thread counts them.
        calls: Whether the main thread must call :meth:`is_meeting`.
        seen: The signal that this rank has seen, or 0.
        seen_at: The time of that signal, by `time.monotonic`.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._is_alone = session.world_size == 1
        self.passed = 0
        self.calls = False
        self.seen, self.seen_at = 0, 0.0
        self._phase, self._evaluates = 0, False
        # Guards the phase, the count and the vote together: a vote is for a boundary of one phase.
        self._lock = threading.Lock()
        self._at: tuple[int, int] | None = None  # (phase, passed): where the main thread waits, or meets
        self._is_decided = threading.Event()
        # A signal handler may run while the main thread holds any lock. SimpleQueue.put() is reentrant;
        # Event.set() and Queue.put() are not, and would deadlock.
        self._reasons: SimpleQueue[None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._is_closing = False

    def open(self, wishes: Callable[[], bool]) -> None:
        """Start the thread, if there are several ranks.

        Args:
            wishes: Returns whether this rank has a reason besides a signal; the thread calls it, in training.
                Not stored: it refers to the run, which has this object and the loader, and the cycle would
                keep the loader's workers alive.

        Collectives: one broadcast, if there are several ranks.
        """
        if self._is_alone:
            return
        environment = self._session.job.environment
        if environment.world_size != self._session.world_size or environment.master_address is None:
            # A backend that connects its ranks without the launcher: without a store they meet everywhere.
            self.calls = True
            return
        # Rank 0's number for all: after a run that failed on some ranks alone, their counts differ.
        number = self._session.broadcast(next(_runs), where="the number of a run")
        name = f"tp/boundaries/{number}"
        # A second connection: the main thread may hold the lock of the first while it waits for a rank that
        # waits for this rank's vote.
        store = PrefixStore(name, rendezvous_store(environment).clone())  # type: ignore[attr-defined]  # no stub
        self._thread = threading.Thread(
            target=self._run, args=(store, wishes), name="tp-step-boundaries", daemon=True
        )
        self._thread.start()

    def close(self) -> None:
        """End the thread: it must not return from the store into an interpreter that is shutting down."""
        self._is_closing = True
        self._reasons.put(None)
        if self._thread is not None:
            self._thread.join(_OPEN_S)
            self._thread = None

    def note(self, number: int) -> None:
        """Note a signal; called from the signal handler."""
        if not self.seen:
            self.seen, self.seen_at = number, time.monotonic()
        self.call()

    def call(self) -> None:
        """Make the ranks meet soon, as this rank has a reason; may be called from a signal handler."""
        if self._is_alone:
            self.calls = True
        else:
            self._reasons.put(None)

    def begin_phase(self, *, evaluates: bool) -> None:
        """Start a new phase, and count its boundaries from 0. Call it on all ranks."""
        with self._lock:  # the thread votes with both values
            self._phase, self.passed, self._evaluates = self._phase + 1, 0, evaluates

    def is_meeting(self) -> bool:
        """Return whether all ranks meet at the boundary that the main thread has reached.

        If this rank has voted for this boundary, waits until the round is decided.
        """
        if self._is_alone:
            self.calls = False
            return True
        if self._thread is None:
            return self.calls
        boundary = (self._phase, self.passed)
        with self._lock:  # the thread may be about to vote
            if self._at is None or boundary < self._at:
                return False
        while not self._is_decided.wait(_OPEN_S) and self._thread.is_alive():
            pass  # a thread that has lost the store decides nothing
        with self._lock:
            if self._at is None or boundary < self._at:
                return False
            if self._at[0] == self._phase:
                return True
            # An earlier phase, which ended on all ranks before the boundary that was agreed on.
            self._at, self.calls = None, False
            return False

    def has_met(self) -> None:
        """Note that all ranks have met where :meth:`is_meeting` was true.

        Call it after the exchange. Earlier, this rank's thread could open a new round while the others still
        wait here, and they would vote for another boundary.
        """
        with self._lock:  # the thread may have voted since then, for a later boundary
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
        """Open a round if there is a reason, and vote in an open one; return whether rounds have ended."""
        text = store.get("round").decode()
        number, state = text.split(" ", 1)
        if state == _CLOSED:
            return True
        # No new round before the meeting of the last one (_at is None after it): every rank knows its place.
        has_reason = self._at is None and (self.seen or (not self._evaluates and wishes()))
        if state != "open" and has_reason:
            text = store.compare_set("round", text, f"{int(number) + 1} open").decode()
        if text.endswith(" open"):
            self._vote(store, text)
        return False

    def _vote(self, store: Store, text: str) -> None:
        """Vote in an open round, and pass its outcome to the main thread."""
        number, _ = text.split(" ")
        with self._lock:
            self._is_decided.clear()
            # This thread sets the flag and then reads the count; the main thread counts and then reads the
            # flag. So a main thread that missed the flag is in the count, and has not passed this vote.
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
                elif self._session.is_main:
                    outcome = self._outcome(store, number)
                else:
                    outcome = None
                if outcome is None:
                    time.sleep(_ANSWER_S)
                else:  # compare_set: the first outcome of a round wins, and may be another rank's
                    store.compare_set("round", text, f"{number} {outcome}")
            about, *where = now.split(" ")
            if about == number and len(where) == 2:
                decided = int(where[0]), int(where[1])
        finally:
            with self._lock:
                self._at, self.calls = decided, decided is not None
            self._is_decided.set()

    def _outcome(self, store: Store, number: str) -> str | None:
        """Return the latest boundary of all votes, once all ranks have voted."""
        names = [f"vote/{rank}" for rank in range(self._session.world_size)]
        if not store.check(names):  # a rank's run has not begun yet
            return None
        votes = [vote.decode().split(" ") for vote in store.multi_get(names)]
        if [_CLOSED] in votes:
            return _CLOSED
        if any(vote[0] != number for vote in votes):
            return None
        phase, passed = max((int(phase), int(passed)) for _, phase, passed in votes)
        return f"{phase} {passed}"


# -- Signals that ask a run to end: noted when they arrive, acted on between two steps ------------


# Of the launcher and Slurm, of Slurm's warning before the time limit, of Ctrl-C, of a closed terminal.
# Windows has the first and the third.
_USR1, _HUP = getattr(signal, "SIGUSR1", None), getattr(signal, "SIGHUP", None)
_SIGNALS = [number for number in (signal.SIGTERM, _USR1, signal.SIGINT, _HUP) if number is not None]
_SCONTROL_TIMEOUT_S = 60.0


class Interrupted(SystemExit):
    """Raised when a signal has ended the run after a step, with its state saved.

    If nobody catches it, the process exits with the conventional status, 128 plus the signal's number. It
    is not an ``Exception``: a handler for errors must not keep the process alive.

    Attributes:
        signal: The signal.
        checkpoint: The checkpoint, or ``None`` if nothing was saved.
    """

    def __init__(self, number: int, checkpoint: Any) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        return f"{self.signal.name}: the run ended after a step; saved: {self.checkpoint}"


def interrupted(
    number: int, session: Session, signals: "SignalWatch", *, step: int, saved: Path | None
) -> Interrupted:
    """Return the exception that ends the run, after a report to the user, the launcher and Slurm.

    Raises:
        BaseException: The program's own handler raises.
    """
    error = Interrupted(number, saved)
    write_exit_report(number, saved)
    if session.is_main:
        log.warning("%s: the run ended after step %d; saved: %s", error.signal.name, step, saved)
        if number == _USR1:
            _requeue()
    signals.pass_on()
    return error


class Decision(NamedTuple):
    """The agreement of the ranks between two steps; by default, to do nothing.

    Attributes:
        signal: The number of a signal that a rank has seen, or 0.
        is_due: Whether a checkpoint is due by rank 0's clock.
        stop: Why a rank asks the run to end, or ``None``.
        save: Whether a rank asks for a checkpoint.
    """

    signal: int = 0
    is_due: bool = False
    stop: str | None = None
    save: bool = False


class SignalWatch:
    """Catches signals, and makes all ranks act on one at the same step.

    Ranks get a signal at different moments, so they exchange what they have seen at a boundary that all
    agree on. A second Ctrl-C interrupts at once. A handler that the program had set is called after the save.

    Args:
        catches: Whether to set signal handlers. Without them the ranks still agree on requests of stop() and
            save().
    """

    def __init__(self, session: Session, boundaries: StepBoundaries, *, catches: bool) -> None:
        self._session, self._boundaries = session, boundaries
        self._catches = catches
        self._previous: dict[int, Any] = {}
        self._is_passed_on = False  # the signal, to the program's own handler
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        if not self._catches:
            return self
        if threading.current_thread() is not threading.main_thread():
            _warn_of_thread()
        else:
            for number in _SIGNALS:
                # nohup starts a program with SIGHUP ignored: closing the terminal must not end the run.
                if number != _HUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._previous:
            self._put_back(number)
        try:
            self.pass_on()  # where no step came after the signal
        finally:
            self._previous.clear()

    def pass_on(self) -> None:
        """Call the handler that the program had set for the signal that this rank has seen, once."""
        number = self._boundaries.seen
        handler = self._previous.get(number)
        if self._is_passed_on or not callable(handler) or handler is signal.default_int_handler:
            return
        self._is_passed_on = True
        handler(number, None)

    def _put_back(self, number: int) -> None:
        before = self._previous[number]  # None for a handler that was not set from Python
        if before is None:
            before = signal.SIG_DFL
        signal.signal(number, before)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # In a process forked during the run, which has inherited this handler. A loader's worker ignores
            # the signal: the run needs its batches until it has saved. Any other process gets it as before.
            if get_worker_info() is None:
                self._put_back(number)
                os.kill(os.getpid(), number)
            return
        if number == _HUP:
            discard_closed_terminal()
        if self._boundaries.seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        # Only take note: the main thread may hold any lock, or be in the middle of a step.
        self._boundaries.note(number)

    def decide(self, *, due: bool, stop: str | None = None, save: bool = False) -> Decision:
        """Return the agreement of all ranks on what is due by rank 0's clock, and on any rank's requests.

        Collectives: one all-gather of objects over all ranks.
        """
        requests = self._session.gather_objects(
            (self._boundaries.seen, due, stop, save), where="what is due between steps"
        )
        signals, is_due, reasons, saves = zip(*requests, strict=True)
        reason = next((reason for reason in reasons if reason is not None), None)
        return Decision(max(signals), is_due[0], reason, any(saves))

    def seconds_since(self) -> float:
        """Return the seconds since the first rank saw a signal.

        Collectives: one all-gather of objects over all ranks.
        """
        boundaries = self._boundaries
        if boundaries.seen:
            seconds = time.monotonic() - boundaries.seen_at
        else:
            seconds = 0.0
        return max(self._session.gather_objects(seconds, where="seconds since a signal"))


@cache
def _warn_of_thread() -> None:
    log.warning(
        "fit runs in a thread, and Python sets signal handlers in the main thread alone: SIGTERM, Ctrl-C and "
        "the warning of a scheduler do not save this run; call fit in the main thread for that"
    )


def _requeue() -> None:
    """Put this Slurm job back into the queue, to be started again with the same script.

    Does nothing outside Slurm. If Slurm refuses (``--no-requeue``, no batch job), logs its reason.

    Source: the manual of ``scontrol``, "requeue".
    """
    job = os.environ.get("SLURM_JOB_ID")
    if job is None:
        return
    array, task = os.environ.get("SLURM_ARRAY_JOB_ID"), os.environ.get("SLURM_ARRAY_TASK_ID")
    if array is not None and task is not None:
        job = f"{array}_{task}"
    try:
        done = subprocess.run(
            ["scontrol", "requeue", job],
            capture_output=True,
            text=True,
            timeout=_SCONTROL_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        log.warning("job %s could not be put back into Slurm's queue: %s", job, error)
        return
    if done.returncode:
        log.warning("job %s could not be put back into Slurm's queue: %s", job, done.stderr.strip())
    else:
        log.info("job %s is back in Slurm's queue", job)
