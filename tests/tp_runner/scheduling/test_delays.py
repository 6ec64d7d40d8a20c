"""Items that are tried again rest before it, and nobody waits for them; the clock is the tests' own."""

import itertools
import time

import pytest
import tp_runner
from tp_runner import OrderedRunner, UnorderedRunner
from tp_runner._scheduling._run import Death, SplitChunk, after_death  # private: a chunk of three needs luck
from tp_runner.engines import Chunk, Died, Settings


class Clock:
    """Stands still but for the sleeps of this thread, where it does the work itself, and for the tests."""

    def __init__(self):
        self.now = 0.0

    def monotonic(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock.monotonic)
    monkeypatch.setattr(time, "sleep", clock.sleep)
    return clock


DELAY_S = 3600.0  # so long that a test which waits for it ends at its deadline
RESTING = {"engine": "thread", "max_retries": 2, "retry_delay_s": DELAY_S, "queue_scale": 8}


def fails_first(calls, failing, on_call=lambda item: None):
    def work(item):
        calls.append(item)
        on_call(item)
        if item in failing and calls.count(item) <= failing[item]:
            raise OSError(f"attempt {calls.count(item)}")
        return item

    return work


def test_others_go_on_and_results_that_have_no_order_do_not_wait(clock):
    calls = []
    work = fails_first(calls, {0: 1})
    with tp_runner.map(work, range(10), n_workers=1, ordered=False, **RESTING) as results:
        assert sorted(next(results) for _ in range(9)) == list(range(1, 10))
        assert calls.count(0) == 1  # it rests
        clock.now += DELAY_S
        assert list(results) == [0]
    assert calls[-2:] == [9, 0]


def test_results_in_order_stay_so_while_later_items_are_worked_on(clock):
    calls = []

    def on_call(item):
        if item == 5:  # which is there only because nothing waited for the first one
            clock.now += DELAY_S

    work = fails_first(calls, {0: 1}, on_call)
    with tp_runner.map(work, range(6), n_workers=1, **RESTING) as results:
        assert list(results) == list(range(6))
    assert calls == [0, 1, 2, 3, 4, 5, 0]


INLINE = {"engine": "inline", "n_workers": 1, "max_retries": 9, "retry_delay_s": 0.5}


def test_each_delay_is_twice_the_one_before_up_to_sixteen_times(clock):
    began = []

    def work(item):
        began.append(clock.now)
        if len(began) < 8:
            raise OSError(item)
        return item

    assert list(tp_runner.map(work, [0], **INLINE)) == [0]
    delays = [later - earlier for earlier, later in itertools.pairwise(began)]
    assert delays == pytest.approx([0.5, 1.0, 2.0, 4.0, 8.0, 8.0, 8.0], abs=0.02)


def test_what_has_rested_is_tried_in_the_order_of_its_time(clock):
    work = fails_first([], {0: 2, 1: 1})
    assert list(tp_runner.map(work, [0, 1], ordered=False, **INLINE)) == [1, 0]


def test_an_item_that_took_too_long_rests_and_those_beside_it_do_not():
    death = Death(
        Died(0, -9), current=(1, 1), is_timeout=True, is_revived=True, any_alive=True, held=(0, 1, 2)
    )
    decision = after_death(
        Chunk(1, 0, ["a", "b", "c"], 1), death, Settings(max_retries=3, retry_delay_s=2.0, timeout_s=1.0)
    )
    assert isinstance(decision, SplitChunk)
    assert [part.delay_s for part in decision.parts] == [0.0, 2.0, 0.0]
    mended = after_death(
        Chunk(1, 0, ["a"], 1),
        death._replace(current=(1, 0), is_timeout=False),
        Settings(max_retries=3, retry_delay_s=2.0),
    )
    assert [part.delay_s for part in mended.parts] == [0.0]  # a death is not the item's failure


@pytest.mark.parametrize("kind", [OrderedRunner, UnorderedRunner])
def test_closing_a_stream_and_the_runner_does_not_wait_for_what_rests(clock, kind):
    calls = []

    class Failing(kind):
        producer_work = staticmethod(lambda device, cfg, item: fails_first(calls, {1: 9})(item))

    with Failing(1, **RESTING) as runner:
        with runner.stream([0, 1]) as results:
            assert next(results) == 0
        assert list(runner.stream([2])) == [2]
    assert calls.count(1) <= 1


def test_cancelling_does_not_wait_for_what_rests(clock):
    calls = []
    runner = []

    class Failing(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            if item == 1:
                runner[0].cancel()
            return fails_first(calls, {0: 9})(item)

    runner.append(Failing(1, **RESTING))
    with runner[0], pytest.raises(tp_runner.errors.RunCancelledError):
        list(runner[0].stream([0, 1]))
    assert calls.count(0) <= 1


def test_futures_beside_one_that_rests_are_done_and_closing_tries_it_again_at_once(clock):
    calls = []

    class Failing(OrderedRunner):
        producer_work = staticmethod(lambda device, cfg, item: fails_first(calls, {3: 2})(item))

    with Failing(1, **RESTING) as runner:
        futures = [runner.submit(item) for item in range(8)]
        others = [future.result(800) for item, future in enumerate(futures) if item != 3]
        assert others == [0, 1, 2, 4, 5, 6, 7]
        assert not futures[3].done()
    assert futures[3].result(0) == 3
    assert calls.count(3) == 3


def test_processes_and_the_callers_thread_rest_too():
    def work(state, item):
        state[item] = state.get(item, 0) + 1
        if state[item] <= 2 and item == 1:
            raise OSError("again")
        return item

    options = {"n_workers": 1, "init": lambda device: {}, "max_retries": 2, "retry_delay_s": 0.001}
    for kind in ({"engine": "inline"}, {"start_method": "fork"}):
        assert list(tp_runner.map(work, range(3), **options, **kind)) == [0, 1, 2]
