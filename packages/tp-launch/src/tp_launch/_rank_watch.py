"""The watch over the ranks of this host: the order of their ends, their children, and early exits.

torch polls its processes every tenth of a second and stamps failures with whole seconds, too coarse to
separate a cause from its consequences. It ends the other ranks with SIGTERM, but a rank in a collective never
runs its Python handler. And it does not end the children of a rank that died.
"""

import contextlib
import os
import select
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

from tp_launch._addresses import Endpoint

_TICK_S = 0.02  # while ranks start, or without pidfds
_POLL_S = 0.1  # for the deadline of the grace and for a new attempt, which no exit announces
_CHECK_S = 0.5
_CONNECT_S = 10.0
_UNSURE_CHECKS = 10


@dataclass(frozen=True, slots=True)
class Rank:
    """One process of one attempt, and the paths of its logs."""

    local_rank: int
    rank: int
    directory: Path
    stdout: Path
    stderr: Path


@dataclass(frozen=True, slots=True)
class RankDeath:
    """The end of a rank: the number of ranks that had ended before, and its exit status.

    ``code`` is negative for a signal, as in ``subprocess``; None if torch collected the process first.
    """

    order: int
    code: int | None


class RankWatch:
    """Watches the processes of the current attempt from a thread, and kills those that do not end."""

    def __init__(self, *, failure_grace_s: float) -> None:
        self._failure_grace_s = failure_grace_s
        # Reentrant: a signal handler calls `signal` in the main thread, which may hold the lock already.
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        # Of the current attempt, by local rank; process ids and their descriptors are known once ranks run.
        self._ranks: dict[int, Rank] = {}
        self._pids: dict[int, int] = {}
        self._pidfds: dict[int, int] = {}
        self._deaths: dict[int, RankDeath] = {}
        self._killed: set[int] = set()
        self._kill_at: float | None = None  # when the ranks that still run are killed
        self._signum: int | None = None  # a signal for every rank, also for those that start later
        self._thread = threading.Thread(target=self._run, name="tp-launch-watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def follow(self, ranks: list[Rank]) -> None:
        """Watch the ranks of a new attempt instead of the last one."""
        with self._lock:
            self._reset()
            self._ranks = {rank.local_rank: rank for rank in ranks}

    def deaths(self) -> dict[int, RankDeath]:
        """Return the ranks of the current attempt that have ended, by local rank."""
        with self._lock:
            return dict(self._deaths)

    def check(self) -> None:
        """Look for ended ranks now, without waiting for the thread."""
        with self._lock:
            self._find_pids()
            self._see_deaths()

    def started(self) -> int:
        """Return how many ranks of the current attempt have reported their process ids."""
        with self._lock:
            return len(self._pids)

    def killed(self) -> set[int]:
        """Return the local ranks that were killed because they did not end in time."""
        with self._lock:
            return set(self._killed)

    def signal(self, signum: int) -> None:
        """Send every rank a signal, also a rank that is just starting; called from a signal handler.

        Its children do not get it: a rank that saves still needs the workers of its loaders. From now on, the
        end of a rank does not make the watch kill the others.
        """
        with self._lock:
            self._signum = signum
            for local_rank, pid in self._pids.items():
                self._pass_signal(local_rank, pid)
            self._find_pids()

    def _pass_signal(self, local_rank: int, pid: int) -> None:
        if self._signum is not None and local_rank not in self._deaths:
            _signal_living(pid, self._signum)

    def end_all(self) -> None:
        """Send every rank SIGTERM, and kill those that still run after ``failure_grace_s``."""
        with self._lock:
            self._find_pids()
            for local_rank, pid in self._pids.items():
                if local_rank not in self._deaths:
                    _signal_living(pid, signal.SIGTERM)
            self._kill_at = time.monotonic() + self._failure_grace_s

    def kill_all(self) -> None:
        """Kill every living rank, with all processes of its group."""
        with self._lock:
            self._find_pids()
            self._kill_living()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join()
        with self._lock:
            self._reset()

    def _run(self) -> None:
        while not self._stopping.is_set():
            with self._lock:
                self.check()
                if self._kill_at is not None and time.monotonic() > self._kill_at:
                    self._kill_living()
                    self._kill_at = None
                fds = list(self._pidfds.values())
                complete = len(fds) + len(self._deaths) == len(self._ranks)
            if fds and complete:
                # Wakes at the first end: of two deaths within a tick, the first is the cause. Without the
                # lock, so that a signal handler need not wait for it. If another thread closes a descriptor
                # during the wait, that only ends early.
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
                continue  # not written yet
            self._pids[local_rank] = pid
            self._pass_signal(local_rank, pid)
            with contextlib.suppress(AttributeError, OSError):  # only Linux has pidfds: elsewhere, poll
                self._pidfds[local_rank] = os.pidfd_open(pid)

    def _see_deaths(self) -> None:
        ended: list[tuple[bool, int, int | None]] = []
        for local_rank, pid in list(self._pids.items()):  # a copy: a signal handler may add a rank
            if local_rank in self._deaths:
                continue
            is_over, code = _ended(pid)
            if is_over:
                # Of two that end within one look, the one that a signal ended comes first: the other one may
                # have ended as a consequence.
                ended.append((code is None or code >= 0, local_rank, code))
        for _, local_rank, code in sorted(ended):
            self._deaths[local_rank] = RankDeath(len(self._deaths), code)
            fd = self._pidfds.pop(local_rank, None)
            if fd is not None:
                os.close(fd)
            if code is None or code == 0:
                continue
            # torch starts each rank in a new session, so its group has its children. The id is not reused
            # yet: the rank has not been collected, or only just now.
            _signal_group(self._pids[local_rank], signal.SIGKILL)
            if self._kill_at is None and self._signum is None:
                self._kill_at = time.monotonic() + self._failure_grace_s

    def _kill_living(self) -> None:
        for local_rank, pid in self._pids.items():
            if local_rank not in self._deaths and not _ended(pid)[0]:
                self._killed.add(local_rank)
                _signal_group(pid, signal.SIGKILL)

    def _reset(self) -> None:
        for fd in self._pidfds.values():
            os.close(fd)
        self._ranks = {}
        self._pids = {}
        self._pidfds = {}
        self._deaths = {}
        self._killed = set()
        self._kill_at = None


def _ended(pid: int) -> tuple[bool, int | None]:
    """Return whether a child has ended, and its exit status if known."""
    if not hasattr(os, "waitid"):  # macOS
        import psutil

        try:
            return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE, None
        except psutil.NoSuchProcess:
            return True, None
    try:
        # WNOWAIT leaves the child to be collected by torch, which would not find its status otherwise.
        seen = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG)
    except ChildProcessError:  # torch has collected it already
        return True, None
    if seen is None:
        return False, None
    if seen.si_code == os.CLD_EXITED:
        status = seen.si_status
    else:
        status = -seen.si_status
    return True, status


def _signal_living(pid: int, signum: int) -> None:
    """Signal a single process, unless it has ended: another process may soon have its id."""
    if not _ended(pid)[0]:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signum)


def _signal_group(pid: int, signum: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signum)


@dataclass(frozen=True, slots=True)
class Attempt:
    """One start of all ranks, after ``number`` earlier ones; ``store`` is the ranks' store."""

    number: int
    nodes: int
    store: Endpoint


class ExitedRanks:
    """Announces ranks that exited with status 0 while others of this host still run, from a thread.

    That alone is no failure: a rank may have less work than the others. So the exit is written into the
    ranks' store, where a rank that waits for the exited one finds it.
    """

    def __init__(self, deaths: Callable[[], Mapping[int, RankDeath]]) -> None:
        self._deaths = deaths
        self._lock = threading.Lock()
        self._attempt: Attempt | None = None
        self._ranks: Mapping[int, Rank] = {}
        self._checks: Counter[int] = Counter()  # the checks at which a rank was seen to have exited
        self._announced: set[int] = set()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tp-launch-exits", daemon=True)

    def follow(self, attempt: Attempt, ranks: Mapping[int, Rank]) -> None:
        with self._lock:  # otherwise the thread could announce a rank of the last attempt for this one
            self._attempt = attempt
            self._ranks = dict(ranks)
            self._checks = Counter()
            self._announced = set()
        if self._thread.ident is None:
            self._thread.start()

    def close(self) -> None:
        self._ending.set()
        if self._thread.ident is not None:
            self._thread.join(timeout=_CONNECT_S)

    def _run(self) -> None:
        while not self._ending.wait(_CHECK_S):
            with self._lock:
                attempt = self._attempt
                ranks = self._ranks
                deaths = self._deaths()
                self._checks.update(local for local, death in deaths.items() if not death.code)
                # Seen twice: ranks that end together need no announcement. If torch has collected the
                # status, it was 0 if torch has let the others run for some more seconds.
                new = {
                    local
                    for local, death in deaths.items()
                    if self._checks[local] >= (2 if death.code == 0 else _UNSURE_CHECKS)
                } - self._announced
                if attempt is None or not new or len(deaths) == len(ranks):
                    continue
                self._announced |= new
            _announce(attempt, [ranks[local].rank for local in new if local in ranks])


def _announce(attempt: Attempt, exited: list[int]) -> None:
    from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported
    from tp_core.launching import EXITED_KEY

    try:
        store = TCPStore(
            attempt.store.host,
            attempt.store.port,
            is_master=False,
            wait_for_workers=False,
            timeout=timedelta(seconds=_CONNECT_S),
        )
        for rank in exited:
            store.set(EXITED_KEY.format(attempt=attempt.number, rank=rank), "")
    except RuntimeError:
        return  # the store is gone: waiting ranks notice that themselves
