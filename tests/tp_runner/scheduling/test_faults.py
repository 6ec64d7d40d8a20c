"""What goes wrong is really done here: every line of the table of faults."""

import contextlib
import os
import pickle
import signal
import threading

import pytest
from tp_runner import (
    NotPicklableError,
    OrderedRunner,
    WorkerError,
)

from tests.tp_runner.obedient import ENGINES, IDS, Holder, Ordered, Unordered

# -- producer_work raises ----------------------------------------------------------------------


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_finished_predecessors_come_first_then_the_error_with_all_that_is_known(options):
    got = []
    with Ordered(2, **options) as runner:
        with pytest.raises(WorkerError, match=r"item 30 \(\('raise', ValueError\('thirty'\)\)\)") as e:
            got.extend(runner.stream([*range(30), ("raise", ValueError("thirty")), 31]))
        assert list(runner.stream(range(5))) == [0, 10, 20, 30, 40]
    assert got == [i * 10 for i in range(30)]
    error = e.value
    assert error.index == 30
    assert error.device == "cpu"
    assert error.worker in {0, 1}
    assert "in producer_work" in error.remote_traceback
    assert "ValueError: thirty" in error.remote_traceback
    assert isinstance(error.__cause__, ValueError)
    assert isinstance(error, RuntimeError)


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_all_results_before_a_failure_are_delivered(options):
    got = []
    items = [*range(300), ("raise", KeyError("x")), *range(300)]
    with Ordered(2, **options) as runner, pytest.raises(WorkerError):
        got.extend(runner.stream(items))
    assert got == [i * 10 for i in range(300)]


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_errors_can_stand_in_the_place_of_their_items(options):
    items = [("raise", ValueError(i)) if i % 7 == 3 else i for i in range(200)]
    with Ordered(2, on_error="return", **options) as runner:
        results = list(runner.stream(items))
    for i, result in enumerate(results):
        if i % 7 == 3:
            assert isinstance(result, WorkerError)
            assert result.index == i
        else:
            assert result == i * 10


def test_an_unordered_failure_is_raised_too():
    with Unordered(2) as runner, pytest.raises(WorkerError) as e:
        list(runner.stream([1, 2, ("raise", ValueError("three"))]))
    assert e.value.index == 2


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_a_failed_item_is_tried_again_as_often_as_asked(options, tmp_path):
    items = [1, ("raise-times", str(tmp_path / "a"), 2), 3]
    with Ordered(2, max_retries=2, **options) as runner:
        assert list(runner.stream(items)) == [10, "at last", 30]
    with Ordered(2, max_retries=1, **options) as runner, pytest.raises(WorkerError) as e:
        list(runner.stream([1, ("raise-times", str(tmp_path / "b"), 2), 3]))
    assert e.value.index == 1
    assert (tmp_path / "b").read_text() == "xx"


# -- exceptions that cannot travel -------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "name"),
    [
        *((ENGINES[0], name) for name in ("no-pickle", "no-unpickle", "no-text", "exit")),
        (ENGINES[1], "no-pickle"),
        (ENGINES[2], "no-text"),
        (ENGINES[3], "exit"),
    ],
    ids=str,
)
def test_an_exception_that_cannot_travel_arrives_as_text(options, name):
    with Ordered(2, **options) as runner:
        with pytest.raises(WorkerError) as e:
            list(runner.stream([("raise-made", name)]))
        assert "in producer_work" in e.value.remote_traceback
        expected = {
            "no-pickle": "NoPickle",
            "no-unpickle": "NoUnpickle",
            "no-text": "NoText",
            "exit": "SystemExit",
        }[name]
        assert expected in str(e.value)
        assert list(runner.stream([1])) == [10]


def test_the_errors_themselves_can_be_pickled():
    with Ordered(1, engine="thread") as runner, pytest.raises(WorkerError) as e:
        list(runner.stream([("raise", ValueError("x"))]))
    again = pickle.loads(pickle.dumps(e.value))
    assert (str(again), again.index, again.item) == (str(e.value), 0, e.value.item)


# -- abandoned calls ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "kind"), [*((options, Ordered) for options in ENGINES), (ENGINES[0], Unordered)], ids=str
)
def test_after_an_abandoned_call_only_new_results_come(options, kind):
    with kind(2, **options) as runner:
        for result in runner.stream(range(1000, 3000)):
            assert result >= 10000
            break
        assert sorted(runner.stream(range(100))) == [i * 10 for i in range(100)]
        stream = runner.stream(range(1000, 3000))
        next(stream)
        stream.close()
        assert list(stream) == []
        assert sorted(runner.stream(range(100))) == [i * 10 for i in range(100)]
        with pytest.raises(WorkerError):
            list(runner.stream([("raise", ValueError("x")), *range(1000, 3000)]))
        assert sorted(runner.stream(range(100))) == [i * 10 for i in range(100)]


def test_a_newer_stream_leaves_an_older_one_as_it_is():
    with Ordered(1) as runner:
        old = runner.stream(range(10_000))
        next(old)
        assert list(runner.stream([1])) == [10]
        assert list(old) == [i * 10 for i in range(1, 10_000)]


# -- start and end -----------------------------------------------------------------------------


class BadStart(OrderedRunner):
    @staticmethod
    def producer_init(device, cfg):
        raise OSError("no model here")


class BadEnd(OrderedRunner):
    @staticmethod
    def producer_end(device, cfg):
        raise OSError("disk full")


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_a_start_that_raises_is_raised_at_the_start(options):
    with pytest.raises(WorkerError, match="did not start on cpu: OSError: no model here") as e:
        BadStart(2, **options)
    assert e.value.device == "cpu"


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_an_end_that_raises_is_raised_at_the_end(options):
    runner = BadEnd(2, **options)
    assert list(runner.stream([5])) == [5]
    with pytest.raises(WorkerError, match=r"the end of worker . on cpu raised: OSError: disk full"):
        runner.close()
    runner.close()


def test_an_end_that_takes_the_process_with_it_is_raised_too():
    class ExitsAtEnd(OrderedRunner):
        @staticmethod
        def producer_end(device, cfg):
            os._exit(3)

    runner = ExitsAtEnd(1, max_restarts=1)
    with pytest.raises(WorkerError, match="ended before it was done: exit status 3"):
        runner.close()


@pytest.mark.parametrize("max_restarts", [0, 1])
def test_a_worker_that_dies_with_nothing_to_do_before_its_end_is_an_error_unless_deaths_are_mended(
    max_restarts, is_running, wait_until
):
    class Pid(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, data):
            return os.getpid()

    runner = Pid(1, max_restarts=max_restarts, start_method="fork")
    (pid,) = runner.stream([0])
    os.kill(pid, signal.SIGKILL)
    wait_until(lambda: not is_running(pid))
    with contextlib.nullcontext() if max_restarts else pytest.raises(WorkerError, match="SIGKILL"):
        runner.close()


# -- pickling ----------------------------------------------------------------------------------


def test_an_item_that_cannot_be_pickled_is_named_with_the_path_to_the_culprit():
    with Ordered(2) as runner:
        path = r"item\.parts\['inner'\]\[1\] \(_thread\.lock\)"
        with pytest.raises(NotPicklableError, match=path) as e:
            list(runner.stream([1, 2, Holder(), 4]))
        assert e.value.index == 2
        assert isinstance(e.value, TypeError)
        assert list(runner.stream([1])) == [10]


def test_a_result_that_cannot_be_pickled_is_named_with_the_path_to_the_culprit():
    with Ordered(2) as runner:
        path = r"result\.parts\['inner'\]\[1\] \(_thread\.lock\)"
        with pytest.raises(NotPicklableError, match=path) as e:
            list(runner.stream([1, ("return", "holder"), 4]))
        assert e.value.index == 1
        assert list(runner.stream([1])) == [10]


def test_a_result_that_only_cloudpickle_can_pickle_works():
    with Ordered(2) as runner:
        assert next(runner.stream([("return", "lambda")]))() == 7


def test_a_class_that_cannot_be_pickled_is_named():
    lock = threading.Lock()

    class Locked(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            return lock

    with pytest.raises(NotPicklableError, match=r"Locked.*closure lock"):
        Locked(2)


def test_of_items_that_fail_to_unpickle_only_the_culprits_fail():
    class Sour:
        def __init__(self, value):
            self.value = value

        def __setstate__(self, state):
            raise ValueError("sour")

    with Ordered(2, on_error="return") as runner:
        results = list(runner.stream([*range(100), Sour(1), *range(100)]))
    assert isinstance(results.pop(100), NotPicklableError)
    assert results == [i * 10 for i in range(100)] * 2


# -- input and consumer ------------------------------------------------------------------------


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_an_input_that_raises_is_raised_after_the_results_before_it(options):
    def items():
        yield from range(50)
        raise LookupError("no more input")

    got = []
    with Ordered(2, **options) as runner:
        with pytest.raises(LookupError, match="no more input") as e:
            got.extend(runner.stream(items()))
        assert e.traceback[-1].name == "items"
        assert got == [i * 10 for i in range(50)]
        assert list(runner.stream([1])) == [10]


@pytest.mark.parametrize(
    ("options", "method"),
    list(zip(ENGINES, ["consumer_work", "consumer_init", "consumer_end", "consumer_work"], strict=True)),
    ids=str,
)
def test_a_consumer_that_raises_is_raised_and_the_runner_stays_usable(options, method):
    def fail(*_):
        raise LookupError(method)

    kind = type("Failing", (Ordered,), {method: staticmethod(fail)})
    with kind(2, **options) as runner:
        for _ in range(2):
            with pytest.raises(LookupError, match=method) as e:
                runner(range(100))
            assert e.traceback[-1].name == "fail"
        assert list(runner.stream([1, 2])) == [10, 20]
