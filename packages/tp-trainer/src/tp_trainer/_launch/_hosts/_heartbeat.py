"""Which hosts of a job are still there: each one counts at the store, and its server looks.

A host whose cable is pulled says nothing any more: its connections stay open, and its peers wait in
a collective until that has lasted for half an hour. Heartbeats at the application find it out.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Heartbeats"]

_PAUSE = 0.5  # of the timeout: this host itself was suspended for so long, and cannot judge others


@dataclass(slots=True)
class _Pulse:
    """The count of a host, and since when it stands."""

    count: int = 0
    since: float = field(default_factory=time.monotonic)
    beats: int = 0  # how often it was seen to move


class Heartbeats:
    """One host's heartbeat and, on the host that serves the store, its look at the others'.

    Every method talks to the store, and raises as the store does when that cannot be reached.

    Args:
        prefix: Where in the store the job's keys are.
        name: What the other hosts call this one in messages.
        serves: Whether this host serves the store, and so is the one that judges.
        timeout_s: How long a host may be silent.
        clock: Seconds from any moment on.
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
        self._told = 0  # losses that this host has heard of
        self._looked = clock()
        self._pulses: dict[int, _Pulse] = {}
        self._gone: set[int] = set()

    def look(self, store: Any) -> list[tuple[str, int]]:
        """Give a sign of life, and return the hosts that were lost since the last call.

        Returns:
            For each lost host what to say of it, and how many hosts were there without it.
        """
        if not self._number:
            self._enter(store)
        store.add(self._key("beat", self._number), 1)
        if self._serves:
            self._judge(store)
        lost = []
        while store.check([self._key("lost", self._told + 1)]):
            self._told += 1
            alive, _, text = store.get(self._key("lost", self._told)).decode().partition(" ")
            lost.append((text, int(alive)))
        return lost

    def leave(self, store: Any) -> None:
        """Announce that this host leaves of its own accord: it does not count as lost."""
        if self._number:
            store.set(self._key("left", self._number), "")

    def _enter(self, store: Any) -> None:
        number = store.add(f"{self._prefix}/hosts", 1)
        store.set(self._key("name", number), self._name)
        self._told = store.add(f"{self._prefix}/losses", 0)  # those were of others, before this one came
        self._number = number

    def _judge(self, store: Any) -> None:
        now = self._clock()
        was_paused = now - self._looked > _PAUSE * self._timeout_s
        self._looked = now
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
                # One that never moved had gone before this server came: nobody waits for it.
                if pulse.beats:
                    self._publish(store, n, alive=1 + sum(m not in self._gone for m in known))

    def _publish(self, store: Any, number: int, *, alive: int) -> None:
        name = store.get(self._key("name", number)).decode()
        text = f"host {name} was lost: it has not been heard of for {self._timeout_s:g} s"
        index = store.add(f"{self._prefix}/losses", 1)
        store.set(self._key("lost", index), f"{alive} {text}")

    def _key(self, kind: str, number: int) -> str:
        return f"{self._prefix}/{kind}/{number}"
