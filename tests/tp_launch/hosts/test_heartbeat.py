"""Heartbeats of the hosts of a job, over a real store and with a clock that the test moves."""

from typing import Any

import pytest
from torch.distributed import HashStore
from tp_launch._addresses import Endpoint
from tp_launch._host_watch import HostHeartbeats, HostLoss, JobHost  # private: the clock is the test's


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def hosts(clock: Clock) -> list[HostHeartbeats]:
    """Three hosts of one job; the first serves."""
    endpoint = Endpoint("127.0.0.1", 0)
    hosts = [
        JobHost(endpoint=endpoint, run_id="job", name=name, serves=name == "a", timeout_s=10)
        for name in ("a", "b", "c")
    ]
    return [HostHeartbeats(host, clock=clock) for host in hosts]


def _pass(clock: Clock, store: Any, alive: list[HostHeartbeats], *, seconds: int) -> list[HostLoss]:
    """What the last one of those that are alive hears in so many seconds."""
    heard = []
    for _ in range(seconds):
        clock.now += 1
        for host in alive:
            lost = host.beat(store)
        heard += lost
    return heard


def test_hosts_that_beat_are_not_lost(clock, hosts):
    assert _pass(clock, HashStore(), hosts, seconds=60) == []


def test_a_silent_host_is_lost_once_and_all_others_hear_of_it(clock, hosts):
    store = HashStore()
    _pass(clock, store, hosts, seconds=5)
    assert _pass(clock, store, hosts[::2], seconds=9) == []
    heard = _pass(clock, store, hosts[::2], seconds=30)
    assert heard == [HostLoss("host b was lost: it has not been heard of for 10 s", 2)]


def test_a_host_that_leaves_is_not_missed(clock, hosts):
    store = HashStore()
    _pass(clock, store, hosts, seconds=5)
    hosts[1].leave(store)
    assert _pass(clock, store, hosts[::2], seconds=30) == []


def test_a_host_that_joins_later_does_not_hear_of_old_losses(clock, hosts):
    store = HashStore()
    _pass(clock, store, hosts[:2], seconds=5)
    _pass(clock, store, hosts[:1], seconds=30)
    assert _pass(clock, store, hosts[::2], seconds=30) == []


def test_a_server_that_was_suspended_does_not_judge_the_others(clock, hosts):
    store = HashStore()
    _pass(clock, store, hosts, seconds=5)
    clock.now += 300
    assert hosts[0].beat(store) == []
    assert _pass(clock, store, hosts, seconds=30) == []
