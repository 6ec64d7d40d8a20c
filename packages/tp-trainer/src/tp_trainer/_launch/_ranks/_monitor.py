"""Watch the ranks die: in which order, and that none outlives the job.

torch looks at its processes every tenth of a second and stamps failures with whole seconds, too
coarse to tell a cause from its consequences. It asks the others to end with SIGTERM, which a rank
that handles the signal in Python never notices inside a collective; and it forgets the children of
a rank that has died.
"""

import contextlib
import os
import select
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Death", "Rank", "Watch"]

_TICK_S = 0.02
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of one attempt, and where its logs are."""

    local_rank: int
    rank: int
    directory: Path
    stdout: Path
    stderr: Path


@dataclass(frozen=True, slots=True)
class Death:
    """The end of a rank: how many had ended before, and its exit status where it was seen.

    ``code`` is negative for a signal, as in ``subprocess``; None when torch was faster.
    """

    order: int
    code: int | None


class Watch:
    """A thread that sees the processes of the current attempt end."""

    def __init__(self, *, failure_grace_s: float) -> None:
        self._failure_grace_s = failure_grace_s
        self._lock = threading.RLock()  # a signal handler may come in between
        self._stopping = threading.Event()
        self._ranks: dict[int, Rank] = {}
        self._pids: dict[int, int] = {}  # local rank to process id
        self._deaths: dict[int, Death] = {}
        self._killed: set[int] = set()
        self._kill_at: float | None = None
        self._telling: int | None = None
        self._pidfds: dict[int, int] = {}  # local rank to descriptor
        self._thread = threading.Thread(target=self._run, name="tp-launch-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def follow(self, ranks: list[Rank]) -> None:
        """Watch a fresh attempt instead of the one before."""
        with self._lock:
            self._forget()
            self._ranks = {rank.local_rank: rank for rank in ranks}

    def deaths(self) -> dict[int, Death]:
        """Return the ranks of the current attempt that have ended, by local rank."""
        with self._lock:
            return dict(self._deaths)

    def look(self) -> None:
        """See now who has ended, whatever the thread has come to."""
        with self._lock:
            self._find_pids()
            self._see_deaths()

    def found(self) -> int:
        """Return how many ranks of the current attempt have reported their ids."""
        with self._lock:
            return len(self._pids)

    def killed(self) -> set[int]:
        """Return the local ranks that were killed because they did not end when asked."""
        with self._lock:
            return set(self._killed)

    def signal(self, signum: int) -> None:
        """Give every rank a signal, also one that is only just starting; called from a signal handler.

        Its children do not get it: a rank that saves still needs its loaders' workers for that. Those
        that end afterwards take no others along.
        """
        with self._lock:
            self._telling = signum
            for local_rank, pid in self._pids.items():
                self._tell(local_rank, pid)
            self._find_pids()

    def _tell(self, local_rank: int, pid: int) -> None:
        if self._telling is not None and local_rank not in self._deaths:
            _signal_living(pid, self._telling)

    def end_all(self) -> None:
        """Ask every rank to end, and kill after the grace those that do not."""
        with self._lock:
            self._find_pids()
            for local_rank, pid in self._pids.items():
                if local_rank not in self._deaths:
                    _signal_living(pid, signal.SIGTERM)
            self._kill_at = time.monotonic() + self._failure_grace_s

    def kill_all(self) -> None:
        """Kill every rank that is still there, with all processes of its group."""
        with self._lock:
            self._find_pids()
            self._kill_living()

    def stop(self) -> None:
        """End the thread."""
        self._stopping.set()
        self._thread.join()
        with self._lock:
            self._forget()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                self.look()
                if self._kill_at is not None and time.monotonic() > self._kill_at:
                    self._kill_living()
                    self._kill_at = None
                fds = list(self._pidfds.values())
                complete = len(fds) + len(self._deaths) == len(self._ranks)
            if fds and complete:
                # Wakes as soon as one of them ends. A descriptor closed by another thread meanwhile
                # only ends the wait early.
                poller = select.poll()
                for fd in fds:
                    poller.register(fd, select.POLLIN)
                poller.poll(_POLL_S * 1000)
            else:
                self._stopping.wait(_TICK_S)

    def _find_pids(self) -> None:
        for local_rank in self._ranks.keys() - self._pids.keys():
            try:
                pid = int((self._ranks[local_rank].directory / "pid").read_text())
            except (OSError, ValueError):
                continue  # not that far yet
            self._pids[local_rank] = pid
            self._tell(local_rank, pid)
            with contextlib.suppress(AttributeError, OSError):  # not on every system
                self._pidfds[local_rank] = os.pidfd_open(pid)

    def _see_deaths(self) -> None:
        ended: list[tuple[bool, int, int | None]] = []
        for local_rank, pid in list(self._pids.items()):  # a signal handler may find another one meanwhile
            if local_rank in self._deaths:
                continue
            is_over, code = _ended(pid)
            if is_over:
                # Of two that are found together, the one that a signal ended was not merely the
                # first to notice the other's end.
                ended.append((code is None or code >= 0, local_rank, code))
        for _, local_rank, code in sorted(ended):
            self._deaths[local_rank] = Death(len(self._deaths), code)
            fd = self._pidfds.pop(local_rank, None)
            if fd is not None:
                os.close(fd)
            if code is None or code == 0:
                continue
            # Its group id cannot be another's yet: it has not been collected, or just now.
            _signal_group(self._pids[local_rank], signal.SIGKILL)
            if self._kill_at is None and self._telling is None:
                self._kill_at = time.monotonic() + self._failure_grace_s

    def _kill_living(self) -> None:
        for local_rank, pid in self._pids.items():
            if local_rank not in self._deaths and not _ended(pid)[0]:
                self._killed.add(local_rank)
                _signal_group(pid, signal.SIGKILL)

    def _forget(self) -> None:
        for fd in self._pidfds.values():
            os.close(fd)
        self._ranks, self._pids, self._pidfds = {}, {}, {}
        self._deaths, self._killed, self._kill_at = {}, set(), None


def _ended(pid: int) -> tuple[bool, int | None]:
    """Whether a child has ended, and how, leaving it to torch to collect."""
    if not hasattr(os, "waitid"):
        import psutil

        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, None
        except psutil.NoSuchProcess:
            return True, None
    try:
        seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:
        return True, None
    if seen is None:
        return False, None
    return True, seen.si_status if seen.si_code == os.CLD_EXITED else -seen.si_status


def _signal_living(pid: int, signum: int) -> None:
    """Signal a process alone, unless it has ended: its id may be another's soon."""
    if not _ended(pid)[0]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def _signal_group(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)
