"""Signals that ask a run to end, noted when they come and acted on between two steps."""

import logging
import os
import signal
import subprocess
import threading
import time
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple, Self

from torch.utils.data import get_worker_info
from tp_core.plugins import Session

from tp_trainer._opening._boundaries import StepBoundaries
from tp_trainer._rank_exit import discard_closed_terminal, write_exit_report

log = logging.getLogger("tp_trainer")

_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_SCONTROL_TIMEOUT_S = 60.0


class Interrupted(SystemExit):
    """A signal asked the run to end, and it did so after a step, with its state saved.

    Not caught, it ends the process with the conventional status: 128 and the signal's number. It is
    not an ``Exception``: a handler for errors must not keep a process alive that was asked to end.

    Attributes:
        signal: Which one.
        checkpoint: Where the state is, or ``None`` if nothing was saved.
    """

    def __init__(self, number: int, checkpoint: Any) -> None:
        super().__init__(128 + number)
        self.signal = signal.Signals(number)
        self.checkpoint = checkpoint

    def __str__(self) -> str:
        return f"{self.signal.name}: the run ended after a step; saved: {self.checkpoint}"


def interrupted(number: int, session: Session, *, step: int, saved: Path | None) -> Interrupted:
    """Return what ends a run that a signal asked to end; the user, the launcher and Slurm know of it then.

    Args:
        number: The signal.
        session: Whose run it is.
        step: After which optimizer step it ends.
        saved: The checkpoint of that step.
    """
    error = Interrupted(number, saved)
    write_exit_report(number, saved)
    if session.is_main:
        log.warning("%s: the run ended after step %d; saved: %s", error.signal.name, step, saved)
        if number == signal.SIGUSR1:
            _requeue()
    return error


class Decision(NamedTuple):
    """What the ranks have agreed on between two steps; by default nothing.

    Attributes:
        signal: The number of a signal that one of them has seen, or 0.
        is_due: Whether rank 0 says that something is due.
        stop: Why one of them wants the run to end, or ``None``.
        save: Whether one of them wants a checkpoint.
    """

    signal: int = 0
    is_due: bool = False
    stop: str | None = None
    save: bool = False


class SignalWatch:
    """Watches for signals, and lets all ranks learn of one at the same step.

    Ranks get a signal at different moments, and ask each other at a boundary that they agree on. A second
    Ctrl-C interrupts at once.

    Args:
        session: Whose ranks are asked.
        boundaries: Where they are asked.
        catches: Whether signals are caught; without, they do what they did, and ranks agree on what stop()
            and save() have asked for alone.
    """

    def __init__(self, session: Session, boundaries: StepBoundaries, *, catches: bool = True) -> None:
        self._session, self._boundaries = session, boundaries
        self._catches = catches
        self._previous: dict[int, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        # Python lets only the main thread set handlers; a run in another thread goes on without.
        if self._catches and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # nohup has a program ignore that its terminal is closed.
                if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                    self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number in self._previous:
            self._put_back(number)
        self._previous.clear()

    def _put_back(self, number: int) -> None:
        before = self._previous[number]  # None for a handler that was not set from Python
        signal.signal(number, signal.SIG_DFL if before is None else before)

    def _note(self, number: int, _frame: FrameType | None) -> None:
        if os.getpid() != self._pid:
            # Forked meanwhile: what a signal does to a loader's worker is for the run to say; any
            # other process is none of ours.
            if get_worker_info() is None:
                self._put_back(number)
                os.kill(os.getpid(), number)
            return
        if number == signal.SIGHUP:
            discard_closed_terminal()
        if self._boundaries.seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        # Nothing else happens here: a handler may come within any lock, and in the middle of a step.
        self._boundaries.note(number)

    def decide(self, *, due: bool, stop: str | None = None, save: bool = False) -> Decision:
        """Return what the ranks agree on.

        Args:
            due: Whether something is due, by this rank's clock; rank 0's counts.
            stop: Why this rank wants the run to end, or ``None``.
            save: Whether this rank wants a checkpoint.

        Collectives: one all-gather of objects over all ranks.
        """
        asked = self._session.gather_objects((self._boundaries.seen, due, stop, save))
        signals, is_due, reasons, saves = zip(*asked, strict=True)
        reason = next((reason for reason in reasons if reason is not None), None)
        return Decision(max(signals), is_due[0], reason, any(saves))

    def seconds_since(self) -> float:
        """Return how long ago the first of the ranks saw a signal.

        Collectives: one all-gather of objects over all ranks.
        """
        boundaries = self._boundaries
        mine = time.monotonic() - boundaries.seen_at if boundaries.seen else 0.0
        return max(self._session.gather_objects(mine))


def _requeue() -> None:
    """Put this Slurm job back into the queue, to be started again with the same script.

    Outside Slurm nothing is done. A job that Slurm does not let back (``--no-requeue``, no batch job)
    is named in the log, with Slurm's reason.

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
