"""What multiprocessing's users hand to workers, and what a program finds around it there."""

import multiprocessing
import os
import sys
import threading
import types

import cloudpickle
import pytest
import tp_runner
from tp_core.errors import ConfigError, TpError
from tp_runner import OrderedRunner

METHODS = ["forkserver", "fork", pytest.param("spawn", marks=pytest.mark.slow)]


class Counts(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        with cfg.lock:
            cfg.count.value += item
        cfg.queue.put(item)
        return cfg.event.is_set()


@pytest.mark.parametrize("method", METHODS)
def test_locks_values_queues_and_events_reach_the_workers(method):
    context = multiprocessing.get_context(method)
    event = context.Event()
    event.set()
    cfg = {"lock": context.Lock(), "count": context.Value("i", 0), "queue": context.Queue(), "event": event}
    with Counts(2, cfg=cfg, start_method=method) as runner:
        assert list(runner.stream(range(100))) == [True] * 100
        assert sorted(cfg["queue"].get(timeout=800) for _ in range(100)) == list(range(100))
    assert cfg["count"].value == sum(range(100))


@pytest.mark.parametrize("method", METHODS)
def test_a_closure_holds_them_too_and_revived_workers_have_them(method, tmp_path):
    context = multiprocessing.get_context(method)
    count = context.Value("i", 0)

    def work(item):
        with count:
            count.value += 1
        if item == 3 and not (tmp_path / "dead").exists():
            (tmp_path / "dead").touch()
            os._exit(1)

    list(tp_runner.map(work, range(6), n_workers=1, max_restarts=1, start_method=method))
    assert count.value == 7


@pytest.mark.slow
@pytest.mark.parametrize("method", ["forkserver", "fork", "spawn"])
def test_proxies_of_a_manager_work_in_workers(method):
    with multiprocessing.Manager() as manager:
        queue = manager.Queue()
        list(tp_runner.map(queue.put, range(10), n_workers=2, start_method=method))
        assert sorted(queue.get(timeout=800) for _ in range(10)) == list(range(10))


def test_one_of_the_wrong_context_is_refused_with_a_reason():
    lock = multiprocessing.get_context("fork").Lock()
    with pytest.raises(TpError, match="fork context"):
        list(tp_runner.map(lambda _: lock.acquire(), [1], n_workers=1, start_method="forkserver"))


def test_more_of_them_than_a_fork_server_passes_are_refused():
    pipes = [multiprocessing.Pipe() for _ in range(122)]
    with pytest.raises(ConfigError, match=r"244 pipes.* passes 243 at most; start_method='spawn' passes any"):
        list(tp_runner.map(lambda _: len(pipes), [1], n_workers=1, start_method="forkserver"))


@pytest.mark.parametrize("wrap", [dict, types.SimpleNamespace])
def test_what_surrounds_them_is_copied_still(wrap):
    parts = [1, 2]
    cfg = wrap(lock=multiprocessing.get_context("fork").Lock(), parts=parts)

    class Asks(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            return cfg.parts

    with Asks(1, cfg=cfg, engine="thread") as runner:
        parts.append(3)
        assert list(runner.stream([0])) == [[1, 2]]


@pytest.fixture
def by_hand(monkeypatch):
    """Return a module without a file, which goes to workers by value."""
    module = types.ModuleType("made_by_hand")
    exec("def double(x): return 2 * x", vars(module))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module


def test_a_module_that_the_user_pickles_by_value_stays_so(by_hand):
    cloudpickle.register_pickle_by_value(by_hand)
    try:
        assert list(tp_runner.map(by_hand.double, [1], n_workers=1)) == [2]
        assert by_hand.__name__ in cloudpickle.list_registry_pickle_by_value()
    finally:
        cloudpickle.unregister_pickle_by_value(by_hand)


def test_two_threads_pickle_programs_of_one_module(by_hand):
    results = []

    def other():
        results.extend(tp_runner.map(by_hand.double, [1], n_workers=1))

    class Slow:  # its pickling goes on after that in another thread has ended
        def __reduce__(self):
            thread = threading.Thread(target=other)
            thread.start()
            thread.join(800)
            return int, (1,)

    def work(state, item):
        return by_hand.double(item)

    slow, work.__module__ = Slow(), by_hand.__name__
    assert list(tp_runner.map(work, [2], init=lambda device: slow, n_workers=1)) == [4]
    assert results == [2]
    assert by_hand.__name__ not in cloudpickle.list_registry_pickle_by_value()


@pytest.mark.parametrize("method", METHODS)
def test_workers_find_the_arguments_and_the_file_of_the_program(method):
    def look(_):
        return sys.argv, getattr(sys.modules["__main__"], "__file__", None)

    expected = sys.argv, getattr(sys.modules["__main__"], "__file__", None)
    assert list(tp_runner.map(look, [1], n_workers=1, start_method=method)) == [expected]


def test_the_number_of_threads_that_the_user_has_set_stays(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "3")

    def look(_):
        return os.environ["OMP_NUM_THREADS"]

    assert list(tp_runner.map(look, [1], n_workers=1)) == ["3"]
    assert list(tp_runner.map(look, [1], n_workers=1, threads=5)) == ["5"]
