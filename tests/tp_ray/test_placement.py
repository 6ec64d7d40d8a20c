"""Where actors go on a cluster, and how many there are: decisions that need no cluster."""

import pytest
from tp_core.errors import ConfigError

# Private: clusters with so many nodes, and hours on them, cannot be had here.
from tp_ray import _placement, _scaling

CPU = {"CPU": 1.0, "GPU": 0.0}


def node(*, alive=True, **resources):
    return {"Resources": resources, "Alive": alive}


@pytest.mark.parametrize(
    ("nodes", "placement", "n_room"),
    [
        ([node(CPU=2.0), node(CPU=1.0)], None, 3),
        ([node(CPU=2.0), node(CPU=1.0)], "spread", 3),
        ([node(CPU=2.0), node(CPU=1.0)], "strict_spread", 2),
        ([node(CPU=1.0), node(CPU=2.0)], "strict_pack", 2),
        ([node(CPU=2.0), node(CPU=8.0, alive=False)], None, 2),
        ([], "strict_pack", 0),
    ],
)
def test_room_for_so_many_workers_and_no_more(nodes, placement, n_room):
    _placement.require_room(nodes, [CPU] * n_room, placement)
    with pytest.raises(ConfigError, match=f"room for {n_room} of {n_room + 1} actors.*with 1 CPU"):
        _placement.require_room(nodes, [CPU] * (n_room + 1), placement)


def test_fractions_of_a_device_are_what_a_worker_takes():
    half = _placement.needs_of("cuda:0", {"num_gpus": 0.5, "num_cpus": 0.25})
    assert half == {"CPU": 0.25, "GPU": 0.5}
    _placement.require_room([node(CPU=1.0, GPU=2.0)], [half] * 4, None)
    with pytest.raises(ConfigError, match=r"room for 4 of 5.*0\.25 CPU, 0\.5 GPU"):
        _placement.require_room([node(CPU=9.0, GPU=2.0)], [half] * 5, None)


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(_scaling.time, "monotonic", lambda: now[0])
    return now


def test_one_more_is_started_only_when_all_have_been_busy_for_long(clock):
    scaling = _scaling.Scaling(1, 3)
    assert scaling.worker_to_start({0}, {0}, set()) is None
    for clock[0] in 0.7, 0.9:
        assert scaling.worker_to_start({0}, set(), set()) is None  # it was idle meanwhile
    clock[0] = 1.1
    assert scaling.worker_to_start({0}, {0}, set()) is None
    clock[0] = 2.2
    assert scaling.worker_to_start({0}, {0}, {1}) == 2  # not the one that died and stays dead
    for clock[0] in 2.3, 2.5, 4.0:
        assert scaling.worker_to_start({0, 2}, {0}, {1}) is None  # the new one is starting
    clock[0] = 9.0
    assert scaling.worker_to_start({0, 2}, {0, 2}, {1}) is None
    clock[0] = 10.0
    assert scaling.worker_to_start({0, 2}, {0, 2}, {1}) is None  # there are no more


def test_a_worker_between_two_items_counts_as_busy(clock):
    scaling = _scaling.Scaling(1, 2)
    started = None
    while started is None and clock[0] < 5.0:
        assert scaling.worker_to_start({0}, {0}, set()) is None
        clock[0] += 0.05
        started = scaling.worker_to_start({0}, set(), set())  # its result was just taken
        clock[0] += 0.001
    assert started == 1
    assert clock[0] == pytest.approx(1.0, abs=0.1)


def test_those_beyond_the_fewest_go_when_they_have_had_nothing_to_do(clock):
    scaling = _scaling.Scaling(1, 3)
    assert scaling.idle_workers({0, 1, 2}, {1}) == []
    clock[0] = 9.0
    assert scaling.idle_workers({0, 1, 2}, set()) == []
    clock[0] = 10.0
    assert scaling.idle_workers({0, 1, 2}, set()) == [
        2
    ]  # never the first; the other one was busy a while ago
    clock[0] = 19.0
    assert scaling.idle_workers({0, 1}, set()) == [1]
