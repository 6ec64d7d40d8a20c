"""The conformance kit of engines passes a good one, and notices each way to be wrong."""

from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar

import pytest
from tp_core.errors import ConfigError, TpError
from tp_core.plugins import Engine, Pool, Verdict
from tp_testing import EngineConformance


class OnePool(Pool):
    """One worker, in a thread of its own, some items ahead."""

    ahead = 3

    def __init__(self, worker, devices):
        self.work = worker(devices[0])
        self.executor = ThreadPoolExecutor(1)
        self.is_closed = False

    def run(self, items, *, ordered=True):
        self.check()
        waiting = deque()
        for item in items:
            waiting.append(self.executor.submit(self.apply, item))
            if len(waiting) > self.ahead:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()

    def check(self):
        if self.is_closed:
            raise TpError("the pool is closed")

    def apply(self, item):
        try:
            return self.work(item)
        except Exception as error:
            raise TpError(f"item {item!r} failed") from error

    def close(self):
        self.is_closed = True
        self.executor.shutdown()


class OneEngine(Engine):
    name = "one"
    pool = OnePool

    def assess(self, devices):
        return Verdict.fits(1, "one thread")

    def open(self, worker, devices, *, options):
        if options:
            raise ConfigError(f"no option {', '.join(options)}")
        return self.pool(worker, devices)


class TestOne(EngineConformance):
    engine = OneEngine
    patience_s = 0.1
    limits: ClassVar = {"test_several_workers_work_at_the_same_time": "it has one"}


class Nameless(OneEngine):
    name = ""


class Unfit(OneEngine):
    def assess(self, devices):
        return Verdict.unfit("never")


class TakingAnyOption(OneEngine):
    def open(self, worker, devices, *, options):
        return self.pool(worker, devices)


def with_pool(**methods):
    return type("Altered", (OneEngine,), {"pool": type("AlteredPool", (OnePool,), methods)})


def reversed_in_pairs(self, items, *, ordered=True):
    self.check()
    results = list(OnePool.run(self, items))
    for i in range(0, len(results), 2):
        yield from reversed(results[i : i + 2])


def without_the_last(self, items, *, ordered=True):
    results = list(OnePool.run(self, items))
    yield from results if ordered else results[:-1]


def all_read_first(self, items, *, ordered=True):
    self.check()
    some = []
    for item in items:
        some.append(item)
        if len(some) == 200_000:
            break
    yield from OnePool.run(self, some)


def new_worker_each_time(self, worker, devices):
    OnePool.__init__(self, worker, devices)

    def work(item):
        anew = worker(devices[0])
        return anew(item)

    self.work = work


def names_nothing(self, item):
    try:
        return self.work(item)
    except Exception as error:
        raise TpError("an item failed") from error


def raises_it_bare(self, item):
    return self.work(item)


def ends_at_the_first_failure(self, item):
    try:
        return self.work(item)
    except Exception as error:
        self.is_closed = True
        raise TpError(f"item {item!r} failed") from error


def swallowing_the_input(self, items, *, ordered=True):
    self.check()
    results = OnePool.run(self, items)
    while True:
        try:
            yield next(results)
        except (LookupError, StopIteration):
            return


def cut_short(self, item):
    result = OnePool.apply(self, item)
    return result[: 1 << 20] if hasattr(result, "__len__") else result


def closing_once(self):
    if self.is_closed:
        raise TpError("it is closed already")
    OnePool.close(self)


@pytest.mark.parametrize(
    ("engine", "test", "arguments"),
    [
        (Nameless, "it_has_a_name_and_fits_the_devices", {}),
        (Unfit, "it_has_a_name_and_fits_the_devices", {}),
        (TakingAnyOption, "an_unknown_option_is_refused", {}),
        (with_pool(run=reversed_in_pairs), "ordered_results_are_those_of_map", {"n_items": 7}),
        (with_pool(run=without_the_last), "unordered_results_are_the_same_ones", {}),
        (with_pool(__init__=new_worker_each_time), "each_worker_keeps_its_state", {}),
        (
            with_pool(run=all_read_first),
            "the_input_is_read_lazily_and_a_closed_iterator_leaves_the_pool_usable",
            {},
        ),
        (with_pool(apply=names_nothing), "a_failed_item_is_named_and_the_pool_stays_usable", {}),
        (with_pool(apply=raises_it_bare), "a_failed_item_is_named_and_the_pool_stays_usable", {}),
        (with_pool(apply=ends_at_the_first_failure), "a_failed_item_is_named_and_the_pool_stays_usable", {}),
        (with_pool(run=swallowing_the_input), "an_input_that_raises_is_raised", {}),
        (with_pool(apply=cut_short), "large_items_travel_both_ways", {}),
        (
            with_pool(apply=lambda self, item: None if item == "die" else OnePool.apply(self, item)),
            "a_worker_that_dies_is_an_error_and_the_pool_stays_usable",
            {},
        ),
        (
            with_pool(apply=ends_at_the_first_failure),
            "a_worker_that_dies_is_an_error_and_the_pool_stays_usable",
            {},
        ),
        (with_pool(close=closing_once), "closing_twice_does_nothing_and_a_closed_pool_refuses", {}),
        (
            with_pool(check=lambda self: None, close=lambda self: None),
            "closing_twice_does_nothing_and_a_closed_pool_refuses",
            {},
        ),
    ],
)
def test_an_altered_engine_is_caught(engine, test, arguments):
    kit = TestOne()
    getattr(kit, f"test_{test}")(**arguments)
    kit.engine = engine
    with pytest.raises((AssertionError, pytest.fail.Exception, TpError, ValueError)):
        getattr(kit, f"test_{test}")(**arguments)
