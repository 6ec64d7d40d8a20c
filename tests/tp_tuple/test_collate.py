"""Collate functions that return a part for each device."""

import os
import pickle
import random
import threading
from functools import partial
from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.data import DataLoader, Dataset
from torch.utils.data import default_collate as torch_default_collate
from tp_core import tree_leaves
from tp_core.data import Parts
from tp_core.errors import ConfigError

# private: devices that cannot be had here
from tp_tuple import Speeds, TupleParallel, _balance, cat, default_collate, restore_order, tp_collate


class Item(NamedTuple):
    a: int
    b: int


costs = st.lists(st.floats(0, 100), min_size=1, max_size=30)


def split(items, parts, **options):
    return tp_collate(parts, **options)(lambda chunk: {"items": chunk})(items)["items"]


@given(st.integers(1, 40), st.integers(1, 6))
def test_every_item_once_in_order_in_sizes_that_differ_by_at_most_one(length, parts):
    found = split(list(range(length)), parts)
    assert [i for part in found for i in part] == list(range(length))
    sizes = [len(p) for p in found]
    assert len(sizes) == min(parts, length)
    assert max(sizes) - min(sizes) <= 1
    assert list(found.counts) == sizes
    assert found.order is None


@given(st.integers(1, 60), st.lists(st.floats(0.05, 20), min_size=1, max_size=6))
def test_weighted_sizes_are_proportional_and_no_part_is_empty(length, weights):
    found = split(list(range(length)), len(weights), weights=weights)
    assert [i for part in found for i in part] == list(range(length))
    used = weights[: len(found)]
    assert len(found) == min(length, len(weights))
    assert min(found.counts) >= 1
    shares = [length * w / sum(used) for w in used]
    if min(shares) >= 1:
        assert all(abs(n - s) < 1 for n, s in zip(found.counts, shares, strict=True))


@given(costs, st.integers(1, 5))
def test_cost_balanced_parts_keep_the_bound_and_the_order_comes_back(costs, parts):
    found = split(costs, parts, cost=lambda c: c)
    assert sorted(found.order) == list(range(len(costs)))
    flat = [c for part in found for c in part]
    assert flat == [costs[i] for i in found.order]
    assert restore_order(flat, found.order) == costs
    assert torch.equal(restore_order(torch.tensor(flat), found.order), torch.tensor(costs))
    # Graham: the dearest item, or the mean, bounds the best; LPT is within 4/3 of the best.
    best = max(sum(costs) / len(found), *costs)
    assert len(found) == min(parts, len(costs))
    assert max(map(sum, found)) <= sum(costs) / len(found) + max(costs) + 1e-9
    if len(costs) <= len(found):
        assert max(map(sum, found)) <= best + 1e-9


def test_costs_of_graphs_are_spread_evenly():
    generator = random.Random(0)
    sizes = [int(generator.paretovariate(1.2) * 10) for _ in range(64)]
    even = list(map(sum, split(sizes, 4)))
    balanced = list(map(sum, split(sizes, 4, cost=lambda n: n)))
    assert max(balanced) / min(balanced) < 1.02 < 1.5 < max(even) / min(even)


def test_weights_and_costs_go_together():
    found = split([1.0] * 30, 2, cost=lambda c: c, weights=[2, 1])
    assert list(found.counts) == [20, 10]


def test_a_single_value_is_a_tuple_of_parts():
    parts = tp_collate(2)(torch.stack)([torch.full((2,), float(i)) for i in range(5)])
    assert isinstance(parts, Parts)
    assert [p[:, 0].tolist() for p in parts] == [[0.0, 1.0, 2.0], [3.0, 4.0]]


def test_several_values_are_a_tuple_of_parts_for_each():
    x, y = default_collate(2)([(torch.ones(2), i) for i in range(3)])
    assert [p.shape[0] for p in x] == [2, 1]
    assert [p.tolist() for p in y] == [[0, 1], [2]]
    assert x.counts == y.counts == (2, 1)


def test_dicts_and_named_tuples_keep_their_names():
    batch = default_collate(2)([{"x": 1.0, "y": 2}] * 3)
    assert [p.tolist() for p in batch["x"]] == [[1.0, 1.0], [1.0]]
    named = default_collate(2)([Item(1, 2)] * 3)
    assert type(named).__name__ == "Item"
    assert [p.tolist() for p in named.b] == [[2, 2], [2]]


fields = st.sampled_from([1, 2.5, "text", torch.ones(2), torch.ones(2, dtype=torch.long), torch.ones(3)])
plain_items = st.one_of(
    st.tuples(fields, fields).flatmap(lambda item: st.lists(st.just(item), min_size=1, max_size=9)),
    st.lists(st.sampled_from([torch.zeros(2), torch.ones(2), torch.ones(3)]), min_size=1, max_size=5),
    st.lists(st.tuples(st.integers(-9, 9), st.floats(0, 1)), min_size=1, max_size=9),
    st.lists(st.floats(0, 1), min_size=1, max_size=9),
    fields.map(lambda field: [{"field": field}, {"field": field}, {"field": field}]),
)


def outcome(collate, items):
    try:
        return collate(items)
    except RuntimeError as error:  # tensors of different shapes in one part
        return str(error)


@given(plain_items, st.integers(1, 4))
def test_torchs_collate_function_gives_what_it_gives_for_each_part(items, parts):
    found = outcome(default_collate(parts), items)
    expected = outcome(tp_collate(parts)(partial(torch_default_collate)), items)
    assert type(found) is type(expected)
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert type(one) is type(other)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_ragged_lists_and_objects_are_not_coerced():
    items = [[1], [2, 3], [[4], 5], object(), "six"]
    found = split(items, 2)
    assert [a is b for a, b in zip([i for p in found for i in p], items, strict=True)] == [True] * 5


def test_unequal_batches_are_refused_and_not_truncated():
    ragged = tp_collate(2)(tuple)
    with pytest.raises(ConfigError, match=r"same number of values, got \[2, 1\]"):
        ragged([1, 2, 3])
    uneven = tp_collate(2)(lambda items: {str(len(items)): 1})
    with pytest.raises(ConfigError, match=r"same keys, got \['2'\] and in part 1 \['1'\]"):
        uneven([1, 2, 3])


def test_a_container_of_ones_own_is_split_by_select():
    table = torch.arange(10).reshape(5, 2)
    collate = tp_collate(2, select=lambda rows, take: rows[list(take)])(lambda chunk: chunk)
    assert [p.shape[0] for p in collate(table)] == [3, 2]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: tp_collate(0), "ndevices must be at least 1, got 0"),
        (lambda: tp_collate("2"), "ndevices must be a number or a list of devices, got '2'"),
        (lambda: tp_collate(True), "ndevices must be a number or a list of devices, got True"),
        (lambda: tp_collate(2)(3), "a collate function must be callable, got int: 3"),
        (lambda: tp_collate(2, weights=[1]), r"2 parts need 2 weights, got 1: \[1\]"),
        (lambda: tp_collate(2, weights=[1, 0]), r"weights must be positive numbers, got \[1, 0\]"),
        (lambda: tp_collate(2, weights="fast"), "weights must be numbers, 'memory', 'auto' .* got 'fast'"),
        (lambda: tp_collate(2, weights=Speeds(3)), "speeds are of 3 devices, and there are 2"),
        (lambda: split([], 2), "a batch of no items"),
        (lambda: split([1, -1], 2, cost=float), "for item 1 it is -1"),
        (lambda: restore_order([1], (0, 1)), "the order is one of 2 rows, and there are 1"),
        (lambda: Speeds(0), "expected parts >= 1"),
        (
            lambda: TupleParallel(nn.Identity(), ["cpu"], speeds=Speeds(2)),
            "are of 2 devices, and there are 1",
        ),
    ],
)
def test_wrong_arguments_are_refused(make, message):
    with pytest.raises(ConfigError, match=message):
        make()


def test_memory_weights_on_a_device_that_tells_none_are_an_error(monkeypatch):
    monkeypatch.setattr(_balance, "free_nbytes", lambda device: {0: 600, 1: None}[device.index])
    assert _balance.free_memory([torch.device("xpu:0")] * 2) == [300.0, 300.0]
    with pytest.raises(ConfigError, match="needs the free memory of xpu:1, which does not report it"):
        _balance.free_memory([torch.device("xpu:1")])


def test_memory_weights_need_no_count_of_free_pages(monkeypatch):
    """macOS has no such count."""
    counts = os.sysconf_names
    monkeypatch.setattr(os, "sysconf_names", {n: c for n, c in counts.items() if n != "SC_AVPHYS_PAGES"})
    monkeypatch.setattr(os, "sysconf", lambda name, count=os.sysconf: count(os.sysconf_names[name]))
    assert _balance.free_memory([torch.device("cpu")])[0] > 1


def test_memory_weights_share_the_memory_that_is_free():
    found = split(list(range(9)), ["cpu", "cpu"], weights="memory")
    assert list(found.counts) == [5, 4]


class Clock(threading.local):
    """A clock for each thread, which goes on only when it is told to: no machine is idle enough."""

    now = 0.0

    def perf_counter(self):
        return self.now


class Slow(nn.Module):
    """Devices of which the first takes a quarter of the others' time for each sample."""

    def __init__(self, clock):
        super().__init__()
        self.clock = clock

    def forward(self, x):
        is_first = threading.current_thread() is threading.main_thread()
        self.clock.now += len(x) * (0.001 if is_first else 0.004)
        return x


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr("tp_tuple._balance.time", clock)
    return clock


class Numbers(Dataset):
    def __len__(self):
        return 12 * 10

    def __getitem__(self, i):
        return torch.tensor([float(i)])


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_auto_weights_follow_the_speeds_that_were_measured(workers, clock):
    model = TupleParallel(Slow(clock), ["cpu", "cpu"])
    collate = default_collate(2, weights=Speeds(2, steps=3, warmup=1))
    loader = DataLoader(
        Numbers(), 12, collate_fn=collate, num_workers=workers, prefetch_factor=workers or None
    )
    counts = []
    for batch in loader:
        counts.append(batch.counts)
        model(batch)
    assert counts[0] == (6, 6)
    assert counts[-1][0] >= 8
    assert collate.speeds.is_settled


def test_auto_is_a_fresh_measurement():
    collate = default_collate(2, weights="auto")
    assert isinstance(collate.speeds, Speeds)
    assert collate.speeds.weights() is None
    assert list(collate.speeds) == [1.0, 1.0]


def test_speeds_given_to_the_wrapper_are_measured_there(clock):
    speeds = Speeds(2, steps=1, warmup=0)
    model = TupleParallel(Slow(clock), ["cpu", "cpu"], speeds=speeds)
    model((torch.ones(3, 1), torch.ones(3, 1)))
    assert speeds.is_settled
    assert speeds[0] > speeds[1]


def test_a_step_with_fewer_parts_is_not_measured():
    speeds = Speeds(2, steps=1, warmup=0)
    speeds.note(counts=[3], seconds=[1.0])
    assert not speeds.is_settled


def test_parts_survive_a_loader_with_workers_and_a_pickle():
    parts = default_collate(2, cost=float)([3.0, 1.0, 2.0, 4.0])
    again = pickle.loads(pickle.dumps(parts))
    assert (again.counts, again.order) == (parts.counts, parts.order)
    measured = default_collate(2, weights="auto")([1.0, 2.0])
    assert pickle.loads(pickle.dumps(measured)).speeds.parts == 2


def test_the_loader_of_the_example_feeds_the_model():
    model = TupleParallel(nn.Linear(1, 1), ["cpu", "cpu"], transfer_output=True, reduction=cat)
    seen = 0
    for batch in DataLoader(Numbers(), 32, shuffle=True, collate_fn=default_collate(2)):
        seen += model(batch).shape[0]
    assert seen == 120


def test_the_default_collate_function_that_gets_samples_says_how_to_make_one():
    loader = torch.utils.data.DataLoader([(torch.ones(2), 0)] * 4, 2, collate_fn=default_collate)
    with pytest.raises(ConfigError, match=r"got 2 values of tuple; if these .*default_collate\(2\)"):
        next(iter(loader))
