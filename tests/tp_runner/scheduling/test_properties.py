"""For any items, workers, delays, failures and bounds the results are those of ``map``."""

import collections
import copy
import itertools
import os
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tp_runner import OrderedRunner, UnorderedRunner, WorkerError

# Each example starts processes, or waits for some.
few = settings(max_examples=settings().max_examples // 3)


class Work:
    @staticmethod
    def producer_work(device, cfg, item):
        value, delay_ms, fails = item
        if delay_ms:
            time.sleep(delay_ms / 1000)
        if fails:
            raise ValueError(value)
        return value * value


class Ordered(Work, OrderedRunner):
    pass


class Unordered(Work, UnorderedRunner):
    pass


items_of_any_kind = st.lists(
    st.tuples(st.integers(), st.sampled_from([0] * 9 + [1, 5]), st.sampled_from([False] * 9 + [True])),
    max_size=150,
)


def value_of(result):
    return ("failed", result.index) if isinstance(result, WorkerError) else result


def expected_of(items):
    return [("failed", i) if fails else v * v for i, (v, _, fails) in enumerate(items)]


@pytest.fixture(scope="module", params=[pytest.param("process", marks=pytest.mark.slow), "thread"])
def runners(request):
    made = {}

    def runner(kind, n_workers, scale):
        """Return the one runner of its kind: only those that an example draws are started."""
        if (kind, n_workers, scale) not in made:
            made[kind, n_workers, scale] = kind(
                n_workers, on_error="return", engine=request.param, queue_scale=scale
            )
        return made[kind, n_workers, scale]

    yield runner
    for each in made.values():
        each.close()


@few
@given(
    items=items_of_any_kind,
    n_workers=st.sampled_from([1, 3]),
    scale=st.sampled_from([None, 1, 4.5]),
    lazily=st.booleans(),
)
def test_ordered_results_are_those_of_map(runners, items, n_workers, scale, lazily):
    runner = runners(Ordered, n_workers, scale)
    results = list(runner.stream(iter(items) if not lazily else (item for item in items)))
    assert [value_of(result) for result in results] == expected_of(items)


@pytest.mark.slow
@few
@given(
    items=items_of_any_kind,
    n_workers=st.sampled_from([1, 3]),
    scale=st.sampled_from([None, 1, 4.5]),
    lazily=st.booleans(),
)
def test_unordered_results_are_the_same_multiset(runners, items, n_workers, scale, lazily):
    runner = runners(Unordered, n_workers, scale)
    results = list(runner.stream(items if not lazily else (item for item in items)))
    counted = collections.Counter(value_of(result) for result in results)
    assert counted == collections.Counter(expected_of(items))


@few
@given(items=items_of_any_kind, stop_after=st.integers(0, 20))
def test_an_abandoned_call_leaves_no_trace_in_the_next(runners, items, stop_after):
    runner = runners(Ordered, 3, None)
    for _ in zip(range(stop_after), runner.stream([(7, 0, False)] * 100), strict=False):
        pass
    results = list(runner.stream(items))
    assert [value_of(result) for result in results] == expected_of(items)


class Mortal(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        value, path = item
        if path is not None and not Path(path).exists():
            Path(path).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return value


@few
@given(n_items=st.integers(1, 400), deadly=st.sets(st.integers(0, 399), max_size=4))
def test_deaths_lose_and_double_nothing(tmp_path_factory, n_items, deadly):
    folder = tmp_path_factory.mktemp("deaths")
    items = [(i, str(folder / str(i)) if i in deadly else None) for i in range(n_items)]
    with Mortal(2, max_restarts=10, start_method="fork") as runner:
        assert list(runner.stream(items)) == list(range(n_items))


class Delayed:
    @staticmethod
    def producer_work(device, cfg, item):
        place, array = item
        time.sleep(cfg.delays_ms[place % len(cfg.delays_ms)] / 1000)
        return np.zeros(cfg.nbytes, np.uint8) if cfg.nbytes else array


class DelayedOrdered(Delayed, OrderedRunner):
    pass


class DelayedUnordered(Delayed, UnorderedRunner):
    pass


def most_read_ahead(runner, item, *, n_results, delays_ms):
    """Read so many results of an endless input, now and then slowly; return how far ahead it was read."""
    n_read = most = 0

    def endless():
        nonlocal n_read
        for place in itertools.count():
            n_read += 1
            yield place, copy.copy(item)  # one object many times over would travel once

    with runner, runner.stream(endless()) as results:
        for n, _ in enumerate(itertools.islice(results, n_results)):
            time.sleep(delays_ms[n % len(delays_ms)] / 1000)
            most = max(most, n_read - n)
    return most


delays = st.lists(st.sampled_from([0, 0, 0, 1, 20]), min_size=1, max_size=30)
kinds = st.sampled_from([DelayedOrdered, DelayedUnordered])


@few
@given(kind=kinds, n_workers=st.integers(1, 3), scale=st.integers(1, 40), worker=delays, consumer=delays)
def test_items_on_their_way_are_bounded_whoever_is_slow(kind, n_workers, scale, worker, consumer):
    runner = kind(n_workers, {"delays_ms": worker, "nbytes": 0}, scale, start_method="fork")
    most = most_read_ahead(runner, 0, n_results=60, delays_ms=consumer)
    chunk = max(1, scale // 2)
    # On their way; what the reader holds ready; the chunk that is being consumed.
    assert most <= n_workers * scale + (2 * chunk + 1) + chunk


@pytest.mark.slow
@few
@given(
    kind=kinds,
    n_workers=st.integers(1, 3),
    kib=st.sampled_from([16, 100, 700, 3000]),
    mib=st.integers(4, 16),
    worker=delays,
    consumer=delays,
    of_results=st.booleans(),
)
def test_bytes_on_their_way_are_bounded_whoever_is_slow(
    kind, n_workers, kib, mib, worker, consumer, of_results
):
    cfg = {"delays_ms": worker, "nbytes": kib << 10 if of_results else 0}
    item = 0 if of_results else np.zeros(kib << 10, np.uint8)
    runner = kind(n_workers, cfg, max_bytes=mib << 20, start_method="fork")
    most = most_read_ahead(runner, item, n_results=60, delays_ms=consumer)
    # Two are read ahead before anybody knows how large they are; then one result for each worker is free.
    assert most <= (mib << 10) // kib + 2 + n_workers * of_results
