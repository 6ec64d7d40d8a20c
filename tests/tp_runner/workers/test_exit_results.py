"""What producer_end returns is there when the workers have ended, one for each that there was."""

import os
import signal
import threading

import numpy as np
import pytest
import tp_runner
from tp_runner import NotPicklableError, OrderedRunner, WorkerError

KINDS = [
    pytest.param({"engine": "inline"}, id="inline"),
    pytest.param({"engine": "thread"}, id="thread"),
    pytest.param({"start_method": "fork"}, id="fork"),
    pytest.param({"start_method": "forkserver"}, id="forkserver", marks=pytest.mark.slow),
    pytest.param({"start_method": "spawn"}, id="spawn", marks=pytest.mark.slow),
]


class Counting(OrderedRunner):
    """Each worker counts its items; ``cfg.end`` makes of its number and count what its end returns."""

    @staticmethod
    def producer_init(device, cfg):
        cfg.count = 0

    @staticmethod
    def producer_work(device, cfg, item):
        if item == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        cfg.count += 1
        return item

    @staticmethod
    def producer_end(device, cfg):
        number = tp_runner.worker().number
        return cfg.end(number, cfg.count) if "end" in cfg else (number, cfg.count)


@pytest.mark.parametrize("kind", KINDS)
def test_each_workers_result_is_there_in_the_order_of_their_numbers(kind):
    with Counting(3, **kind) as runner:
        assert list(runner.stream(range(50))) == list(range(50))
        assert runner.exit_results == []  # none has ended
    numbers, counts = zip(*runner.exit_results, strict=True)
    assert numbers == (0, 1, 2)
    assert sum(counts) == 50
    runner.activate()
    assert runner.exit_results == []
    runner.close()
    assert runner.exit_results == [(0, 0), (1, 0), (2, 0)]


@pytest.mark.parametrize("kind", KINDS[:3])
def test_stopped_workers_have_none(kind):
    runner = Counting(2, **kind)
    assert list(runner.stream([1])) == [1]
    runner.stop()
    assert runner.exit_results == [None, None]


def test_replaced_workers_have_one_each_in_the_order_of_their_lives():
    with Counting(1, start_method="fork", max_items_per_worker=2) as runner:
        assert list(runner.stream(range(5))) == list(range(5))
        assert runner.exit_results == [(0, 2), (0, 2)]
    assert runner.exit_results == [(0, 2), (0, 2), (0, 1)]


def test_a_killed_worker_has_none_beside_the_one_in_its_place():
    with Counting(1, start_method="fork", max_restarts=1, on_error="return", max_retries=0) as runner:
        with pytest.raises(tp_runner.WorkerDiedError):
            runner.submit("die").result()  # a second death, which is not mended
        assert runner.exit_results == [None, None]
    with Counting(2, start_method="fork", max_restarts=9, on_error="return") as runner:
        list(runner.stream([1, "die", 2]))
    results = runner.exit_results
    assert results.count(None) == 3  # an item that kills three workers is given up
    assert len(results) == 5
    kept = [number for number, _ in filter(None, results)]
    assert kept == [0, 1]


def test_a_thread_that_does_not_end_in_time_has_none():
    release = threading.Event()

    def end(number, count):
        if number == 1:
            release.wait(800)
        return number

    runner = Counting(2, {"end": end}, engine="thread")
    with pytest.warns(RuntimeWarning, match=r"worker 1 on cpu had not ended after 0.5 s, and is left behind"):
        runner.close(timeout_s=0.5)
    late = runner.exit_results
    release.set()
    assert late[1] is None
    assert runner.exit_results == late  # what comes later is not added


@pytest.mark.parametrize("kind", KINDS[:4])
def test_one_that_raises_has_none_and_the_others_keep_theirs(kind):
    def end(number, count):
        if number == 0:
            raise OSError("disk full")
        return number

    runner = Counting(2, {"end": end}, **kind)
    with pytest.raises(WorkerError, match="the end of worker 0 on cpu raised: OSError: disk full"):
        runner.close()
    assert runner.exit_results == [None, 1]


@pytest.mark.parametrize("kind", KINDS[2:4])
def test_arrays_and_classes_of_the_program_travel(kind):
    class Local:
        def __init__(self, array):
            self.array = array

    with Counting(1, {"end": lambda number, count: Local(np.ones(300_000))}, **kind) as runner:
        pass
    assert runner.exit_results[0].array.sum() == 300_000


def test_what_cannot_travel_is_an_error_for_who_asks():
    with Counting(2, {"end": lambda number, count: threading.Lock()}, start_method="fork") as runner:
        assert list(runner.stream([1])) == [1]
    expected = (
        r"the end of worker 0 on cpu returned what cannot travel: what it returned of type _thread\.lock "
        "cannot be pickled"
    )
    with pytest.raises(NotPicklableError, match=expected):
        _ = runner.exit_results


def test_what_cannot_be_rebuilt_is_an_error_for_who_asks():
    class Bad:
        def __reduce__(self):
            return _fail, ()

    with Counting(1, {"end": lambda number, count: Bad()}, start_method="fork") as runner:
        pass
    with pytest.raises(NotPicklableError, match=r"returned what cannot travel: ValueError: not here"):
        _ = runner.exit_results


def _fail():
    raise ValueError("not here")
