"""What goes wrong is really done here: every line of the table of faults."""

import contextlib
import os
import pickle
import signal
import threading
import time
from pathlib import Path

import pytest
import tp_runner
from tp_runner import (
    ItemTimeout,
    NotPicklableError,
    OrderedRunner,
    RunCancelled,
    RunnerBusy,
    UnorderedRunner,
    WorkerDied,
    WorkerError,
)

ENGINES = [{"start_method": "fork"}, {}, {"engine": "thread"}, {"engine": "inline"}]
IDS = ["fork", "forkserver", "thread", "inline"]


class Obedient:
    """Does what each item says."""

    @staticmethod
    def producer_work(device, cfg, item):
        match item:
            case int():
                return item * 10
            case ("raise", error):
                raise error
            case ("raise-made", name):
                error = MADE[name]()
                raise error
            case ("return", make):
                return MADE[make]()
            case ("kill", number):
                os.kill(os.getpid(), number)
                time.sleep(30)
            case ("kill-once", path):
                if not Path(path).exists():
                    Path(path).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
                    time.sleep(30)
                return "survived"
            case ("raise-times", path, times):
                with Path(path).open("a+") as file:
                    file.write("x")
                    file.seek(0)
                    if len(file.read()) <= times:
                        raise ValueError(times)
                return "at last"
            case ("sleep", seconds):
                time.sleep(seconds)
                return "slept"
            case ("pid",):
                return os.getpid()
        raise AssertionError(item)


class Ordered(Obedient, OrderedRunner):
    pass


class Unordered(Obedient, UnorderedRunner):
    pass


class NoPickleError(Exception):
    def __reduce__(self):
        raise RuntimeError("cannot pickle this")


class NoUnpickleError(Exception):
    def __init__(self, one, two):
        super().__init__(one)


class NoTextError(Exception):
    def __str__(self):
        raise RuntimeError("cannot print this")


class Holder:
    def __init__(self):
        self.parts = {"inner": [1, threading.Lock()]}


MADE = {
    "no-pickle": NoPickleError,
    "no-unpickle": lambda: NoUnpickleError("one", "two"),
    "no-text": NoTextError,
    "exit": lambda: SystemExit(3),
    "holder": Holder,
    "lambda": lambda: lambda: 7,
}


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
    with Ordered(2, retries=2, **options) as runner:
        assert list(runner.stream(items)) == [10, "at last", 30]
    with Ordered(2, retries=1, **options) as runner, pytest.raises(WorkerError) as e:
        list(runner.stream([1, ("raise-times", str(tmp_path / "b"), 2), 3]))
    assert e.value.index == 1
    assert (tmp_path / "b").read_text() == "xx"


# -- exceptions that cannot travel -------------------------------------------------------------


@pytest.mark.parametrize("name", ["no-pickle", "no-unpickle", "no-text", "exit"])
@pytest.mark.parametrize("options", ENGINES, ids=IDS)
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


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
@pytest.mark.parametrize("kind", [Ordered, Unordered])
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


def test_a_stream_that_a_newer_call_ends_says_so():
    with Ordered(1) as runner:
        old = runner.stream(range(10_000))
        next(old)
        assert list(runner.stream([1])) == [10]
        with pytest.raises(RunnerBusy, match="its runner was called again"):
            list(old)


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

    runner = ExitsAtEnd(1)
    with pytest.raises(WorkerError, match="ended before it was done: exit status 3"):
        runner.close()


# -- deaths ------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", ENGINES[:2], ids=IDS[:2])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_a_death_is_noticed_at_once_and_names_signal_and_items(options, number):
    began = time.monotonic()
    with Ordered(2, **options) as runner:
        with pytest.raises(WorkerDied, match=f"killed by {number.name}") as e:
            list(runner.stream([1, ("kill", number), 3]))
        assert time.monotonic() - began < 10
        assert e.value.exitcode == -number
        assert e.value.index == 1
        assert 1 in e.value.held
        assert list(runner.stream([1, 2])) == [10, 20]


def test_a_worker_that_exits_is_dead_too():
    class Exits(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            os._exit(7)

    with Exits(1) as runner, pytest.raises(WorkerDied, match="exit status 7") as e:
        list(runner.stream([1]))
    assert e.value.exitcode == 7


@pytest.mark.parametrize("kind", [Ordered, Unordered])
def test_with_restart_no_item_is_lost_or_doubled(kind, tmp_path):
    items = [("kill-once", str(tmp_path / str(i))) if i % 40 == 11 else i for i in range(200)]
    with kind(2, restart=10) as runner:
        results = list(runner.stream(items))
        assert sum(worker.deaths for worker in runner.stats().workers) == 5
    expected = ["survived" if i % 40 == 11 else i * 10 for i in range(200)]
    if kind is Unordered:
        results.sort(key=str)
        expected.sort(key=str)
    assert results == expected


def test_an_item_that_kills_again_and_again_is_given_up():
    with Ordered(2, restart=100, on_error="return") as runner:
        results = list(runner.stream([1, ("kill", signal.SIGKILL), 3]))
    assert results[::2] == [10, 30]
    assert isinstance(results[1], WorkerDied)
    assert "3 workers died with this item" in str(results[1])


def test_when_the_last_worker_dies_every_item_it_held_is_failed():
    with Ordered(1, on_error="return") as runner:
        got = []
        items = [1, ("kill", signal.SIGKILL), *range(1000)]
        with pytest.raises(WorkerDied, match="no worker is left"):
            got.extend(runner.stream(items))
    assert got[0] == 10
    assert isinstance(got[1], WorkerDied)


def test_a_worker_killed_between_two_calls_is_replaced(is_running, wait_until):
    with Ordered(2) as runner:
        for pid in set(runner.stream([("pid",)] * 50)):
            os.kill(pid, signal.SIGKILL)
            wait_until(lambda pid=pid: not is_running(pid))
        assert list(runner.stream(range(50))) == [i * 10 for i in range(50)]


def test_a_death_is_noticed_although_a_child_of_the_worker_lives_on():
    class Parent(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            if not os.fork():
                time.sleep(8)
                os._exit(0)
            os.kill(os.getpid(), signal.SIGKILL)

    began = time.monotonic()
    with Parent(1) as runner, pytest.raises(WorkerDied, match="SIGKILL"):
        list(runner.stream([1]))
    assert time.monotonic() - began < 7


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


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
@pytest.mark.parametrize("method", ["consumer_init", "consumer_work", "consumer_end"])
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


# -- time --------------------------------------------------------------------------------------


def test_an_item_that_takes_too_long_is_ended_and_its_worker_replaced():
    began = time.monotonic()
    with Ordered(2, timeout_s=0.3) as runner:
        with pytest.raises(ItemTimeout, match=r"item 2 .* took longer than timeout_s=0.3") as e:
            list(runner.stream([1, 2, ("sleep", 60), 4]))
        assert e.value.index == 2
        assert isinstance(e.value, TimeoutError)
        assert list(runner.stream([1, 2])) == [10, 20]
    assert time.monotonic() - began < 20


def test_others_go_on_while_slow_items_are_ended():
    items = [("sleep", 60) if i == 5 else i for i in range(100)]
    with Ordered(2, timeout_s=0.3, on_error="return") as runner:
        results = list(runner.stream(items))
    assert isinstance(results.pop(5), ItemTimeout)
    assert results == [i * 10 for i in range(100) if i != 5]


def test_a_cancelled_call_says_so_and_the_runner_stays_usable(wait_until):
    with Ordered(2) as runner:
        threading.Timer(0.3, runner.cancel).start()
        with pytest.raises(RunCancelled):
            list(runner.stream(("sleep", 0.01) for _ in iter(int, 1)))
        assert list(runner.stream([1])) == [10]


# -- threads and nesting -----------------------------------------------------------------------


def test_a_second_thread_is_refused_with_a_sentence():
    errors = []

    def other(runner):
        try:
            list(runner.stream([1]))
        except RunnerBusy as error:
            errors.append(str(error))

    with Ordered(2) as runner:
        stream = runner.stream(range(10_000))
        next(stream)
        thread = threading.Thread(target=other, args=(runner,))
        thread.start()
        thread.join(10)
        assert errors == [
            (
                "this runner is working on another call, of another thread; wait for that one, or "
                "use a second runner"
            )
        ]
        assert sum(1 for _ in stream) == 9_999


def test_a_runner_inside_a_worker_works():
    def outer(n):
        return sum(tp_runner.map(lambda x: x * x, range(n), devices=2))

    assert list(tp_runner.map(outer, [3, 10], devices=2)) == [5, 285]


def test_leaving_by_an_exception_stops_the_workers_at_once(is_running):
    pids = []
    began = time.monotonic()
    with contextlib.suppress(LookupError), Ordered(2) as runner:
        pids = list(runner.stream([("pid",)] * 20))
        next(runner.stream([1, ("sleep", 60), ("sleep", 60)]))
        raise LookupError
    assert time.monotonic() - began < 5
    assert not any(is_running(pid) for pid in pids)
