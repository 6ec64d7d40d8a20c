"""Workers that die, items that take too long, threads that call at once: each one really happens."""

import contextlib
import os
import signal
import threading
import time

import pytest
import tp_runner
from tp_runner import ItemTimeoutError, OrderedRunner, RunCancelledError, WorkerDiedError

from tests.cases import first_fast
from tests.tp_runner.obedient import ENGINES, IDS, Ordered, Unordered

# -- deaths ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "number"), [(ENGINES[0], signal.SIGSEGV), (ENGINES[1], signal.SIGKILL)], ids=IDS[:2]
)
def test_a_death_is_noticed_at_once_and_names_signal_and_items(options, number):
    with Ordered(2, **options) as runner:
        with pytest.raises(WorkerDiedError, match=f"killed by {number.name}") as e:
            list(runner.stream([1, ("kill", number), 3]))
        assert e.value.exitcode == -number
        assert e.value.index == 1
        assert 1 in e.value.held
        assert list(runner.stream([1, 2])) == [10, 20]


def test_a_worker_that_exits_is_dead_too():
    class Exits(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            os._exit(7)

    with Exits(1) as runner, pytest.raises(WorkerDiedError, match="exit status 7") as e:
        list(runner.stream([1]))
    assert e.value.exitcode == 7


@pytest.mark.parametrize("kind", first_fast([Ordered, Unordered]))
def test_with_restart_no_item_is_lost_or_doubled(kind, tmp_path):
    items = [("kill-once", str(tmp_path / str(i))) if i % 40 == 11 else i for i in range(200)]
    with kind(2, max_restarts=10) as runner:
        results = list(runner.stream(items))
        assert sum(worker.deaths for worker in runner.stats().workers) == 5
    expected = ["survived" if i % 40 == 11 else i * 10 for i in range(200)]
    if kind is Unordered:
        results.sort(key=str)
        expected.sort(key=str)
    assert results == expected


def test_an_item_that_kills_again_and_again_is_given_up():
    with Ordered(2, max_restarts=100, on_error="return") as runner:
        results = list(runner.stream([1, ("kill", signal.SIGKILL), 3]))
    assert results[::2] == [10, 30]
    assert isinstance(results[1], WorkerDiedError)
    assert "3 workers died with this item" in str(results[1])


def test_when_the_last_worker_dies_every_item_it_held_is_failed():
    with Ordered(1, on_error="return") as runner:
        got = []
        items = [1, ("kill", signal.SIGKILL), *range(1000)]
        with pytest.raises(WorkerDiedError, match="no worker is left"):
            got.extend(runner.stream(items))
    assert got[0] == 10
    assert isinstance(got[1], WorkerDiedError)


def test_a_worker_killed_between_two_calls_is_replaced(is_running, wait_until):
    with Ordered(2) as runner:
        for pid in set(runner.stream([("pid",)] * 50)):
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not is_running(pid))
        assert list(runner.stream(range(50))) == [i * 10 for i in range(50)]


def test_a_death_is_noticed_although_a_child_of_the_worker_lives_on(tmp_path):
    noticed = tmp_path / "noticed"

    class Parent(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            if not os.fork():
                while not noticed.exists():
                    time.sleep(0.05)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)

    with Parent(1) as runner, pytest.raises(WorkerDiedError, match="SIGKILL"):
        list(runner.stream([1]))
    noticed.touch()


# -- time --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_item_that_takes_too_long_is_ended_and_its_worker_replaced():
    with Ordered(2, timeout_s=6) as runner:
        with pytest.raises(ItemTimeoutError, match=r"item 2 .* took longer than timeout_s=6") as e:
            list(runner.stream([1, 2, ("sleep", 3600), 4]))
        assert e.value.index == 2
        assert isinstance(e.value, TimeoutError)
        assert list(runner.stream([1, 2])) == [10, 20]


@pytest.mark.slow
def test_others_go_on_while_slow_items_are_ended():
    items = [("sleep", 3600) if i == 5 else i for i in range(100)]
    with Ordered(2, timeout_s=6, on_error="return") as runner:
        results = list(runner.stream(items))
    assert isinstance(results.pop(5), ItemTimeoutError)
    assert results == [i * 10 for i in range(100) if i != 5]


def test_a_cancelled_call_says_so_and_the_runner_stays_usable():
    with Ordered(2) as runner:
        begun = threading.Event()

        def cancel():
            assert begun.wait(800)
            runner.cancel()

        def items():
            while True:
                begun.set()
                yield "sleep", 0.01

        thread = threading.Thread(target=cancel)
        thread.start()
        with pytest.raises(RunCancelledError):
            list(runner.stream(items()))
        thread.join(800)
        assert list(runner.stream([1])) == [10]


# -- threads and nesting -----------------------------------------------------------------------


def test_threads_share_the_workers_of_one_runner():
    results = {}

    def other(runner):
        results["other"] = list(runner.stream(range(3000)))

    with Ordered(2) as runner:
        stream = runner.stream(range(10_000))
        first = next(stream)
        thread = threading.Thread(target=other, args=(runner,))
        thread.start()
        results["mine"] = [first, *stream]
        thread.join(800)
    assert results == {"mine": [i * 10 for i in range(10_000)], "other": [i * 10 for i in range(3000)]}


@pytest.mark.parametrize(
    "method",
    ["fork", pytest.param("forkserver", marks=pytest.mark.slow)],  # of which each worker starts its own
)
def test_a_runner_inside_a_worker_works(method):
    def outer(n):
        return sum(tp_runner.map(lambda x: x * x, range(n), devices=2, start_method=method))

    assert list(tp_runner.map(outer, [3, 10], devices=2)) == [5, 285]


def test_leaving_by_an_exception_stops_the_workers_at_once(is_running):
    pids = []
    with contextlib.suppress(LookupError), Ordered(2) as runner:
        pids = list(runner.stream([("pid",)] * 20))
        next(runner.stream([1, ("sleep", 3600), ("sleep", 3600)]))
        raise LookupError
    assert not any(is_running(pid) for pid in pids)
