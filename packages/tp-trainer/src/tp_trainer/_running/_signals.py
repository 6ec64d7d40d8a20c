"""Signals that ask a run to end: noted when they arrive, acted on between two steps."""

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

# Of the launcher and Slurm, of Slurm's warning before the time limit, of Ctrl-C, of a closed terminal.
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
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


def interrupted(number: int, session: Session, *, step: int, saved: Path | None) -> Interrupted:
    """Return the exception that ends the run, after a report to the user, the launcher and Slurm.

    Args:
        number: The signal.
        session: The session of the run.
        step: The last optimizer step.
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
    agree on. A second Ctrl-C interrupts at once.

    Args:
        session: The session of the ranks.
        boundaries: The boundaries at which ranks exchange what they have seen.
        catches: Whether to set signal handlers. Without them the ranks still agree on requests of stop() and
            save().
    """

    def __init__(self, session: Session, boundaries: StepBoundaries, *, catches: bool = True) -> None:
        self._session, self._boundaries = session, boundaries
        self._catches = catches
        self._previous: dict[int, Any] = {}
        self._pid = os.getpid()

    def __enter__(self) -> Self:
        # Python lets only the main thread set handlers; a run in another thread does without.
        if self._catches and threading.current_thread() is threading.main_thread():
            for number in _SIGNALS:
                # nohup starts a program with SIGHUP ignored: closing the terminal must not end the run.
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
            # In a process forked during the run, which has inherited this handler. A loader's worker ignores
            # the signal: the run needs its batches until it has saved. Any other process gets it as before.
            if get_worker_info() is None:
                self._put_back(number)
                os.kill(os.getpid(), number)
            return
        if number == signal.SIGHUP:
            discard_closed_terminal()
        if self._boundaries.seen and number == signal.SIGINT:
            raise KeyboardInterrupt
        # Only take note: the main thread may hold any lock, or be in the middle of a step.
        self._boundaries.note(number)

    def decide(self, *, due: bool, stop: str | None = None, save: bool = False) -> Decision:
        """Return the agreement of all ranks.

        Args:
            due: Whether a checkpoint is due by this rank's clock; only rank 0's counts.
            stop: Why this rank asks the run to end, or ``None``.
            save: Whether this rank asks for a checkpoint.

        Collectives: one all-gather of objects over all ranks.
        """
        asked = self._session.gather_objects((self._boundaries.seen, due, stop, save))
        signals, is_due, reasons, saves = zip(*asked, strict=True)
        reason = next((reason for reason in reasons if reason is not None), None)
        return Decision(max(signals), is_due[0], reason, any(saves))

    def seconds_since(self) -> float:
        """Return the seconds since the first rank saw a signal.

        Collectives: one all-gather of objects over all ranks.
        """
        boundaries = self._boundaries
        mine = time.monotonic() - boundaries.seen_at if boundaries.seen else 0.0
        return max(self._session.gather_objects(mine))


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
