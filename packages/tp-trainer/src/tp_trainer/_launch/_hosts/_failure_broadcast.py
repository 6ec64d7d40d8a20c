"""Broadcasts the cause of a failure to the other hosts of a job, through the store at which they met.

Without it each host knows only its own ranks: one that waits in a collective for a rank which died
elsewhere, or for a host that was cut off, waits for the deadline of the collective, and then reports
the wait instead of the cause.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar

from tp_trainer._launch._hosts._addresses import Endpoint
from tp_trainer._launch._hosts._heartbeat import Heartbeats

__all__ = ["FailureBroadcast"]

T = TypeVar("T")

_POLL_S = 0.3
_BEAT_S = 1.0  # at most; from one sign of life to the next
_CONNECT_S = 10.0
_LINGER_S = 3.0  # how long the host of the store stays for the others to read
_WAIT_FOR_CAUSE_S = 6.0  # how long a host that only noticed a loss waits for the report of another one

# torch's private key: its agents wait there, deaf to signals and for five minutes, for those that are
# not done. If torch renames it, that wait is back, and nothing else breaks.
_BARRIER = "torchelastic/agent/terminal_state/last_member"


class FailureBroadcast:
    """Sends and receives reports of failures between hosts; a thread listens.

    Args:
        endpoint: Where the store is.
        run_id: The name of the job.
        serves: Whether this host serves the store: it leaves last.
        name: What the other hosts call this one in messages.
        timeout_s: How long a host may be silent before it counts as lost.
        on_report: Called from the thread when another host has reported why it failed.
        on_loss: Called from a thread when a host is lost that the processes of this one talk to,
            with what to say, and with whether the job can go on without it.
    """

    def __init__(
        self,
        endpoint: Endpoint,
        *,
        run_id: str,
        serves: bool,
        name: str,
        timeout_s: float,
        on_report: Callable[[], None],
        on_loss: Callable[[str, bool], None],
    ) -> None:
        self._endpoint = endpoint
        self._run_id = run_id
        self._prefix = f"tp-launch/{run_id}"
        self._serves = serves
        self._timeout_s = timeout_s
        self._on_report = on_report
        self._on_loss = on_loss
        self._heartbeats = Heartbeats(f"{self._prefix}/life", name=name, serves=serves, timeout_s=timeout_s)
        self._nodes = 1
        self._rounds = 0  # how often the hosts have met
        self._has_left = False
        self._store: Any = None
        self._answered = time.monotonic()  # when the store last did
        self._lock = threading.Lock()  # one conversation with the store at a time
        self._report: dict[str, Any] | None = None
        self._tried = threading.Event()  # the store is there, or never will be
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *, nodes: int) -> None:
        """Listen, as one of ``nodes`` hosts; once is enough for all restarts."""
        self._nodes = nodes
        self._rounds += 1
        if self._thread is None:
            self._answered = time.monotonic()
            self._thread = threading.Thread(target=self._run, name="tp-launch-broadcast", daemon=True)
            self._thread.start()
            if not self._serves:
                threading.Thread(target=self._guard, name="tp-launch-guard", daemon=True).start()

    def report(self, failure: Mapping[str, Any], *, sure: bool) -> dict[str, Any] | None:
        """Report why this host failed, and return the first failure that a host has reported.

        Args:
            failure: Values that JSON can hold.
            sure: Whether it is a cause; otherwise another host may know better and is waited for.

        Returns:
            The report of this host or of another one; None when the store has gone.
        """
        if self._thread is None:
            return None
        self._tried.wait(_CONNECT_S)  # a rank may have failed in its first moments
        deadline = time.monotonic() + (0.0 if sure else _WAIT_FOR_CAUSE_S)
        while not self._listen() and self._store is not None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self._report is None:
            # The first one wins, also between two hosts that report at once.
            key, said = f"{self._prefix}/cause", json.dumps(dict(failure))
            told = self._talk(lambda store: store.compare_set(key, "", said))
            self._report = None if told is None else json.loads(told)
        self._leave()
        return self._report

    def close(self) -> None:
        """Stop listening."""
        self._ending.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _POLL_S)  # it may still be connecting
            self._talk(self._heartbeats.leave)

    def received(self) -> dict[str, Any] | None:
        """Return what another host has reported, if one has."""
        return self._report

    def _run(self) -> None:
        self._connect()
        self._tried.set()
        beaten = time.monotonic()
        beat_s = min(_BEAT_S, self._timeout_s / 5)
        while not self._ending.wait(min(_POLL_S, beat_s)):
            if self._store is None and not self._serves:
                self._connect()  # the guard says when it has been tried for long enough
            if self._listen():
                self._on_report()
                self._release()
                self._leave()
                return
            if time.monotonic() - beaten >= beat_s:
                beaten = time.monotonic()
                for text, alive in self._talk(self._heartbeats.look) or []:
                    # Processes started after that, without the host, are unaffected.
                    if self._nodes > alive:
                        self._on_loss(text, True)

    def _guard(self) -> None:
        """Notice that the store is silent: a call to it may never return when a cable is cut."""
        while not self._ending.wait(_POLL_S):
            if time.monotonic() - self._answered > self._timeout_s:
                self._store = None
                self._on_loss(
                    f"the rendezvous host at {self._endpoint} was lost: it has not answered for "
                    f"{self._timeout_s:g} s",
                    False,
                )
                return

    def _connect(self) -> None:
        from torch.distributed import TCPStore  # type: ignore[attr-defined]  # re-exported

        with self._lock, contextlib.suppress(RuntimeError, ValueError):
            # "Master" in the process that serves already means: share that server, and keep it up.
            self._store = TCPStore(
                self._endpoint.host,
                self._endpoint.port,
                is_master=self._serves,
                wait_for_workers=False,
                multi_tenant=True,
                timeout=timedelta(seconds=_CONNECT_S),
            )

    def _listen(self) -> bool:
        if self._report is None:
            key = f"{self._prefix}/cause"
            told = self._talk(lambda store: store.get(key) if store.check([key]) else None)
            self._report = None if told is None else json.loads(told)
        return self._report is not None

    def _release(self) -> None:
        """Release an agent whose ranks are all done: those that it waits for will never be."""
        met = [self._run_id, *(f"torch.rendezvous.{self._run_id}.{i}" for i in range(self._rounds))]

        def release(store: Any) -> None:
            for prefix in met:  # the first one is that of the static rendezvous
                store.set(f"{prefix}/{_BARRIER}", "")

        self._talk(release)

    def _leave(self) -> None:
        """Count this host as informed; the one that serves waits for the rest."""
        if self._has_left:
            return
        self._has_left = True

        def count(store: Any) -> None:
            deadline = time.monotonic() + _LINGER_S
            told = store.add(f"{self._prefix}/told", 1)
            while self._serves and told < self._nodes and time.monotonic() < deadline:
                time.sleep(0.05)
                told = store.add(f"{self._prefix}/told", 0)

        self._talk(count)

    def _talk(self, conversation: Callable[[Any], T]) -> T | None:
        """Return what a conversation with the store comes to, or None when nobody is there to talk to."""
        if self._store is None or not self._lock.acquire(timeout=_CONNECT_S):
            return None
        try:
            if self._store is None:
                return None
            said = conversation(self._store)
            self._answered = time.monotonic()
        except (RuntimeError, ValueError):
            self._store = None  # its host has gone
            return None
        else:
            return said
        finally:
            self._lock.release()
