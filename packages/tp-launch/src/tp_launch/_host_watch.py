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


@dataclass(frozen=True, slots=True, kw_only=True)
class JobHost:
    """This host, as one of the hosts of a job.

    Attributes:
        endpoint: Where the store of the rendezvous listens.
        run_id: The name of the job for the rendezvous.
        name: The name of this host, for people.
        serves: Whether it serves the store: then it leaves last.
        timeout_s: How long a host may be silent before it counts as lost.
    """

    endpoint: Endpoint
    run_id: str
    name: str
    serves: bool
    timeout_s: float

    @property
    def prefix(self) -> str:
        """The prefix of the keys that the launchers of the job share."""
        return f"tp-launch/{self.run_id}"


class StoreConnection:
    """A connection to the rendezvous store, for several threads; it closes itself when the store is gone."""

    def __init__(self, host: JobHost) -> None:
        self._endpoint = host.endpoint
        self._serves = host.serves
        self._store: Any = None
        self._answered = time.monotonic()  # the last answer of the store
        # One query, of several operations, at a time: threads share the store and the counters of heartbeats.
        self._lock = threading.Lock()

    @property
    def is_open(self) -> bool:
        return self._store is not None

    @property
    def silent_s(self) -> float:
        """The seconds since the store has answered."""
        return time.monotonic() - self._answered

    def expect(self) -> None:
        """Count the silence of the store from now on."""
        self._answered = time.monotonic()

    def open(self) -> None:
        """Connect to the store; it stays closed where that fails."""
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

    def close(self) -> None:
        self._store = None

    def query(self, query: Callable[[Any], T]) -> T | None:
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


class FailureBroadcast:
    """Sends and receives reports of failures and heartbeats between hosts; a thread listens.

    Args:
        host: This host.
        on_report: Called from the thread when another host has reported its failure.
        on_loss: Called from a thread when a host is lost that this host's processes communicate with; gets
            a message, and whether the job can continue without it.
    """

    def __init__(
        self,
        host: JobHost,
        *,
        on_report: Callable[[], None],
        on_loss: Callable[[str, bool], None],
    ) -> None:
        self._host = host
        self._on_report = on_report
        self._on_loss = on_loss
        self._store = StoreConnection(host)
        self._heartbeats = HostHeartbeats(host)
        # Of the rendezvous: the hosts of the newest one, and how many there were.
        self._nodes = 1
        self._rounds = 0
        # Of the failure: the first report of any host, and whether this host has counted itself as informed.
        self._report: dict[str, Any] | None = None
        self._is_informed = False
        # Of the thread: the first connection has succeeded or failed; the launch is over.
        self._tried = threading.Event()
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, *, nodes: int) -> None:
        """Count a rendezvous of ``nodes`` hosts; at the first one, start the threads."""
        self._nodes = nodes
        self._rounds += 1
        if self._thread is None:
            self._store.expect()
            # torch's agent occupies the main thread. Daemons: a call to the store may never return.
            self._thread = threading.Thread(target=self._run, name="tp-launch-broadcast", daemon=True)
            self._thread.start()
            if not self._host.serves:
                threading.Thread(target=self._guard, name="tp-launch-guard", daemon=True).start()

    def report(self, failure: Mapping[str, Any], *, sure: bool) -> dict[str, Any] | None:
        """Report why this host failed, and return the first report of any host; None if the store is gone.

        A failure that is not ``sure`` to be a cause waits for another host's report first.
        """
        if self._thread is None:
            return None
        self._tried.wait(_CONNECT_S)  # a rank may have failed in its first moments
        wait_s = 0.0 if sure else _WAIT_FOR_CAUSE_S
        deadline = time.monotonic() + wait_s
        while not self._listen() and self._store.is_open and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self._report is None:
            # compare_set: of two hosts that report at once, the first one wins.
            key, text = f"{self._host.prefix}/cause", json.dumps(dict(failure))
            first = self._store.query(lambda store: store.compare_set(key, "", text))
            if first is None:
                self._report = None
            else:
                self._report = json.loads(first)
        self._count_as_informed()
        return self._report

    def close(self) -> None:
        self._ending.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * _POLL_S)  # it may still be connecting
            self._store.query(self._heartbeats.leave)

    def received(self) -> dict[str, Any] | None:
        return self._report

    def _run(self) -> None:
        self._store.open()
        self._tried.set()
        beat_s = min(_BEAT_S, self._host.timeout_s / 5)
        last_beat = time.monotonic()
        while not self._ending.wait(min(_POLL_S, beat_s)):
            if not self._store.is_open and not self._host.serves:
                self._store.open()  # the guard ends the attempts after the timeout
            if self._listen():
                self._on_report()
                self._release()
                self._count_as_informed()
                return
            if time.monotonic() - last_beat >= beat_s:
                last_beat = time.monotonic()
                self._beat()

    def _beat(self) -> None:
        for loss in self._store.query(self._heartbeats.beat) or []:
            # Not for ranks that were started after the loss: they do not wait for that host.
            if self._nodes > loss.hosts_left:
                self._on_loss(loss.message, True)

    def _guard(self) -> None:
        """Detect a silent store, from a thread that makes no call to it.

        If a cable is cut, a call to the store may never return, and blocks the listening thread.
        """
        while not self._ending.wait(_POLL_S):
            if self._store.silent_s > self._host.timeout_s:
                self._store.close()
                self._on_loss(
                    f"the rendezvous host at {self._host.endpoint} was lost: it has not answered for "
                    f"{self._host.timeout_s:g} s",
                    False,
                )
                return

    def _listen(self) -> bool:
        """Look for a report of another host; return whether there is one."""
        if self._report is None:
            key = f"{self._host.prefix}/cause"
            # check() first: get() of a missing key blocks until the store's timeout.
            text = self._store.query(lambda store: store.get(key) if store.check([key]) else None)
            self._report = None if text is None else json.loads(text)
        return self._report is not None

    def _release(self) -> None:
        """Release this host's agent, if it has finished and waits for the agent of the failed host."""
        # The prefixes of a job's keys in torch: of the static rendezvous, and of each elastic one.
        run_id = self._host.run_id
        prefixes = [run_id, *(f"torch.rendezvous.{run_id}.{i}" for i in range(self._rounds))]

        def release(store: Any) -> None:
            for prefix in prefixes:
                store.set(f"{prefix}/{_BARRIER}", "")

        self._store.query(release)

    def _count_as_informed(self) -> None:
        """Count this host as informed; the host that serves the store waits for the others first."""
        if self._is_informed:
            return
        self._is_informed = True

        def count(store: Any) -> None:
            deadline = time.monotonic() + _LINGER_S
            key = f"{self._host.prefix}/informed"
            informed = store.add(key, 1)
            while self._host.serves and informed < self._nodes and time.monotonic() < deadline:
                time.sleep(0.05)
                informed = store.add(key, 0)

        self._store.query(count)


@dataclass(frozen=True, slots=True)
class HostLoss:
    """The loss of a host: a message for people, and the hosts that are left."""

    message: str
    hosts_left: int


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

    def __init__(self, host: JobHost, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._host = host
        self._clock = clock
        self._number = 0  # of this host, in the order of joining; 0 before it has joined
        self._losses = 0  # the losses that this host has read
        # On the host that serves the store: the last check, and what is known of the others by their numbers.
        self._checked = clock()
        self._pulses: dict[int, _Pulse] = {}
        self._gone: set[int] = set()

    def beat(self, store: Any) -> list[HostLoss]:
        """Count a heartbeat; return the hosts that were lost since the last call."""
        if not self._number:
            self._join(store)
        store.add(self._key("beat", self._number), 1)
        if self._host.serves:
            self._check_others(store)
        lost = []
        while store.check([self._key("lost", self._losses + 1)]):
            self._losses += 1
            hosts_left, _, message = store.get(self._key("lost", self._losses)).decode().partition(" ")
            lost.append(HostLoss(message, int(hosts_left)))
        return lost

    def leave(self, store: Any) -> None:
        """Announce a planned end: this host must not count as lost."""
        if self._number:
            store.set(self._key("left", self._number), "")

    def _join(self, store: Any) -> None:
        number = store.add(self._key("hosts"), 1)
        store.set(self._key("name", number), self._host.name)
        self._losses = store.add(self._key("losses"), 0)  # skip losses from before this host joined
        self._number = number

    def _check_others(self, store: Any) -> None:
        now = self._clock()
        # After a pause of the server itself (a laptop, a debugger, a migrated machine) every count is old.
        was_paused = now - self._checked > _PAUSE * self._host.timeout_s
        self._checked = now
        hosts = store.add(self._key("hosts"), 0)
        numbers = [n for n in range(1, hosts + 1) if n not in self._gone and n != self._number]
        for number in numbers:
            pulse = self._pulses.setdefault(number, _Pulse(since=now))
            count = store.add(self._key("beat", number), 0)
            if count != pulse.count or was_paused:
                if count != pulse.count:
                    pulse.beats += 1
                pulse.count = count
                pulse.since = now
            elif store.check([self._key("left", number)]):
                self._gone.add(number)
            elif now - pulse.since > self._host.timeout_s:
                self._gone.add(number)
                # A count that never changed is of a host that was gone before: no rank waits for it.
                if pulse.beats:
                    alive = [n for n in numbers if n not in self._gone]
                    self._publish_loss(store, number, hosts_left=1 + len(alive))

    def _publish_loss(self, store: Any, number: int, *, hosts_left: int) -> None:
        name = store.get(self._key("name", number)).decode()
        message = f"host {name} was lost: it has not been heard of for {self._host.timeout_s:g} s"
        index = store.add(self._key("losses"), 1)
        store.set(self._key("lost", index), f"{hosts_left} {message}")

    def _key(self, kind: str, number: int | None = None) -> str:
        key = f"{self._host.prefix}/life/{kind}"
        if number is None:
            return key
        return f"{key}/{number}"
