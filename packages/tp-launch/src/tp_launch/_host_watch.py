"""The watch over the other hosts of a job: reports of failures, and heartbeats.

Both go through the store of the rendezvous. Without them each host knows only its own ranks. A rank that
waits in a collective for a dead rank or a lost host would wait until the deadline of the collective, half an
hour. Then it would report the wait instead of the cause.
"""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

from tp_launch._addresses import Endpoint

T = TypeVar("T")

_POLL_S = 0.3
_BEAT_S = 1.0  # the longest time between two heartbeats
_CONNECT_S = 10.0  # for one connection or one query of the store
_LINGER_S = 3.0  # how long the host of the store stays for the others to read
_WAIT_FOR_CAUSE_S = 6.0  # how long a host that only noticed a loss waits for another host's report

# torch's private key: its agents wait there for unfinished ones, for five minutes and without reacting to
# signals. If torch renames it, that wait is back, and nothing else breaks; test_private_torch.py notices.
_BARRIER = "torchelastic/agent/terminal_state/last_member"
_PAUSE = 0.5  # of the timeout: a server that was itself suspended for so long cannot judge the others


class FailureBroadcast:
    """Sends and receives reports of failures and heartbeats between hosts; a thread listens.

    Args:
        serves: Whether this host serves the store: it leaves last.
        timeout_s: How long a host may be silent before it counts as lost.
        on_report: Called from the thread when another host has reported its failure.
        on_loss: Called from a thread when a host is lost that this host's processes communicate with; gets
            a message, and whether the job can continue without it.
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
        self._heartbeats = HostHeartbeats(
            f"{self._prefix}/life", name=name, serves=serves, timeout_s=timeout_s
        )
        self._nodes = 1
        self._rounds = 0  # the number of rendezvous so far
        self._is_informed = False  # whether this host knows the failure, and has counted itself
        self._store: Any = None
        self._answered = time.monotonic()  # the last answer of the store
        # One query, of several operations, at a time: the thread and the main thread share the store and the
        # counters of the heartbeats.
        self._lock = threading.Lock()
        self._report: dict[str, Any] | None = None
        self._tried = threading.Event()  # set once the first connection has succeeded or failed
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *, nodes: int) -> None:
        """Count a rendezvous of ``nodes`` hosts; at the first one, start the threads."""
        self._nodes = nodes
        self._rounds += 1
        if self._thread is None:
            self._answered = time.monotonic()
            # torch's agent occupies the main thread. Daemons: a call to the store may never return.
            self._thread = threading.Thread(target=self._run, name="tp-launch-broadcast", daemon=True)
            self._thread.start()
            if not self._serves:
                threading.Thread(target=self._guard, name="tp-launch-guard", daemon=True).start()

    def report(self, failure: Mapping[str, Any], *, sure: bool) -> dict[str, Any] | None:
        """Report why this host failed, and return the first report of any host; None if the store is gone.

        A failure that is not ``sure`` to be a cause waits for another host's report first.
        """
        if self._thread is None:
            return None
        self._tried.wait(_CONNECT_S)  # a rank may have failed in its first moments
        deadline = time.monotonic() + (0.0 if sure else _WAIT_FOR_CAUSE_S)
        while not self._listen() and self._store is not None and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self._report is None:
            # compare_set: of two hosts that report at once, the first one wins.
            key, text = f"{self._prefix}/cause", json.dumps(dict(failure))
            first = self._query(lambda store: store.compare_set(key, "", text))
            self._report = None if first is None else json.loads(first)
        self._count_as_informed()
        return self._report

    def close(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _POLL_S)  # it may still be connecting
            self._query(self._heartbeats.leave)

    def received(self) -> dict[str, Any] | None:
        return self._report

    def _run(self) -> None:
        self._connect()
        self._tried.set()
        beaten = time.monotonic()
        beat_s = min(_BEAT_S, self._timeout_s / 5)
        while not self._ending.wait(min(_POLL_S, beat_s)):
            if self._store is None and not self._serves:
                self._connect()  # the guard ends the attempts after the timeout
            if self._listen():
                self._on_report()
                self._release()
                self._count_as_informed()
                return
            if time.monotonic() - beaten >= beat_s:
                beaten = time.monotonic()
                for text, alive in self._query(self._heartbeats.beat) or []:
                    # Not for ranks that were started after the loss: they do not wait for that host.
                    if self._nodes > alive:
                        self._on_loss(text, True)

    def _guard(self) -> None:
        """Detect a silent store, from a thread that makes no call to it.

        If a cable is cut, a call to the store may never return, and blocks the listening thread.
        """
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
            # In the process that serves the store already, is_master with multi_tenant shares that server,
            # and keeps it up after the agent has closed its own connection.
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
            # check() first: get() of a missing key blocks until the store's timeout.
            found = self._query(lambda store: store.get(key) if store.check([key]) else None)
            self._report = None if found is None else json.loads(found)
        return self._report is not None

    def _release(self) -> None:
        """Release this host's agent, if it has finished and waits for the agent of the failed host."""
        # The prefixes of a job's keys in torch: of the static rendezvous, and of each elastic one.
        prefixes = [self._run_id, *(f"torch.rendezvous.{self._run_id}.{i}" for i in range(self._rounds))]

        def release(store: Any) -> None:
            for prefix in prefixes:
                store.set(f"{prefix}/{_BARRIER}", "")

        self._query(release)

    def _count_as_informed(self) -> None:
        """Count this host as informed; the host that serves the store waits for the others first."""
        if self._is_informed:
            return
        self._is_informed = True

        def count(store: Any) -> None:
            deadline = time.monotonic() + _LINGER_S
            key = f"{self._prefix}/informed"
            informed = store.add(key, 1)
            while self._serves and informed < self._nodes and time.monotonic() < deadline:
                time.sleep(0.05)
                informed = store.add(key, 0)

        self._query(count)

    def _query(self, query: Callable[[Any], T]) -> T | None:
        """Return the result of a query of the store, or None when the store cannot be reached."""
        if self._store is None or not self._lock.acquire(timeout=_CONNECT_S):
            return None
        try:
            if self._store is None:
                return None
            result = query(self._store)
            self._answered = time.monotonic()
        except (RuntimeError, ValueError):
            self._store = None  # the host that serves it is gone
            return None
        else:
            return result
        finally:
            self._lock.release()


@dataclass(slots=True)
class _Pulse:
    """The last heartbeat count of a host, and the time of its last change."""

    count: int = 0
    since: float = field(default_factory=time.monotonic)
    beats: int = 0  # how often the count was seen to change


class HostHeartbeats:
    """Counts this host's heartbeats in the store; the host that serves it checks the other hosts' counts.

    Every method uses the store, and raises the store's errors.
    """

    def __init__(
        self,
        prefix: str,
        *,
        name: str,
        serves: bool,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._prefix = prefix
        self._name = name
        self._serves = serves
        self._timeout_s = timeout_s
        self._clock = clock
        self._number = 0
        self._losses = 0  # the losses that this host has read
        self._checked = clock()
        self._pulses: dict[int, _Pulse] = {}
        self._gone: set[int] = set()

    def beat(self, store: Any) -> list[tuple[str, int]]:
        """Count a heartbeat; return for each host lost since the last call a message and the hosts left."""
        if not self._number:
            self._join(store)
        store.add(self._key("beat", self._number), 1)
        if self._serves:
            self._check_others(store)
        lost = []
        while store.check([self._key("lost", self._losses + 1)]):
            self._losses += 1
            alive, _, text = store.get(self._key("lost", self._losses)).decode().partition(" ")
            lost.append((text, int(alive)))
        return lost

    def leave(self, store: Any) -> None:
        """Announce a planned end: this host must not count as lost."""
        if self._number:
            store.set(self._key("left", self._number), "")

    def _join(self, store: Any) -> None:
        number = store.add(f"{self._prefix}/hosts", 1)
        store.set(self._key("name", number), self._name)
        self._losses = store.add(f"{self._prefix}/losses", 0)  # skip losses from before this host joined
        self._number = number

    def _check_others(self, store: Any) -> None:
        now = self._clock()
        # After a pause of the server itself (a laptop, a debugger, a migrated machine) every count is old.
        was_paused = now - self._checked > _PAUSE * self._timeout_s
        self._checked = now
        hosts = store.add(f"{self._prefix}/hosts", 0)
        known = [n for n in range(1, hosts + 1) if n not in self._gone and n != self._number]
        for n in known:
            pulse = self._pulses.setdefault(n, _Pulse(since=now))
            count = store.add(self._key("beat", n), 0)
            if count != pulse.count or was_paused:
                pulse.beats += count != pulse.count
                pulse.count, pulse.since = count, now
            elif store.check([self._key("left", n)]):
                self._gone.add(n)
            elif now - pulse.since > self._timeout_s:
                self._gone.add(n)
                # A count that never changed is of a host that was gone before: no rank waits for it.
                if pulse.beats:
                    self._publish(store, n, alive=1 + sum(m not in self._gone for m in known))

    def _publish(self, store: Any, number: int, *, alive: int) -> None:
        name = store.get(self._key("name", number)).decode()
        text = f"host {name} was lost: it has not been heard of for {self._timeout_s:g} s"
        index = store.add(f"{self._prefix}/losses", 1)
        store.set(self._key("lost", index), f"{alive} {text}")

    def _key(self, kind: str, number: int) -> str:
        return f"{self._prefix}/{kind}/{number}"
