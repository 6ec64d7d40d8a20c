"""Starts that hang, work that leaks, programs that start themselves: nothing goes on without an end."""

import multiprocessing
import os
import signal
import threading
import time

import pytest
import tp_runner
from tp_core.errors import ConfigError
from tp_runner import OrderedRunner, WorkerDiedError, WorkerError
from tp_runner._workers import _start  # private: a system without /proc cannot be had here
from tp_runner._workers._processes import ProcessFleet  # private: that workers die here is a matter of chance

NEVER = threading.Event()


def second(state, item):
    return item


@pytest.mark.parametrize(
    "options",
    [
        # The other worker has to be ready in time, however busy the machine is.
        pytest.param({"start_method": "fork", "start_timeout_s": 10.0}, marks=pytest.mark.slow),
        pytest.param({"start_timeout_s": 60.0}, marks=pytest.mark.nightly),
        {"engine": "thread", "start_timeout_s": 2.0},
    ],
    ids=["fork", "forkserver", "thread"],
)
def test_a_start_that_hangs_is_an_error(options):
    with pytest.raises(
        WorkerError, match="worker 0 did not start on cpu: it was not ready after start_timeout_s="
    ):
        list(tp_runner.map(second, range(4), n_workers=2, init=_hang_in_one, **options))


def _hang_in_one(device):
    if tp_runner.worker().number == 0:
        NEVER.wait()


def test_first_results_come_while_another_worker_still_starts(tmp_path):
    def init(device):
        while tp_runner.worker().number == 1 and not (tmp_path / "may start").exists():
            time.sleep(0.01)

    with tp_runner.map(second, range(4), n_workers=2, init=init, start_method="fork") as results:
        first = next(results)
        (tmp_path / "may start").touch()
        assert [first, *results] == [0, 1, 2, 3]


def test_a_process_that_ends_at_its_start_is_an_error():
    def init(device):
        if tp_runner.worker().number == 1:
            os._exit(3)

    with pytest.raises(WorkerDiedError, match=r"worker 1 on cpu died.* before it was ready: exit status 3"):
        list(tp_runner.map(second, range(4), n_workers=2, init=init, start_method="fork"))


def test_a_start_that_hangs_the_second_time_is_an_error(tmp_path):
    class Mortal(OrderedRunner):
        @staticmethod
        def producer_init(device, cfg):
            if (tmp_path / "began").exists():
                NEVER.wait()
            (tmp_path / "began").touch()

        @staticmethod
        def producer_work(device, cfg, item):
            os.kill(os.getpid(), signal.SIGKILL)

    with Mortal(1, start_method="fork", max_restarts=1) as runner:
        # The first start may take its time, and the second one never ends: no machine is too slow for this.
        fleet = runner._pool.fleet
        fleet._settings = fleet._settings._replace(start_timeout_s=0.05)
        with pytest.raises(WorkerError, match=r"worker 0 did not start .* after start_timeout_s=0.05"):
            list(runner.stream([1]))


@pytest.mark.parametrize(
    "options", [{"engine": "thread"}, {"start_method": "fork"}], ids=["thread", "process"]
)
def test_an_interrupt_that_the_work_raises_in_a_worker_is_its_items_error(options):
    def interrupt(item):
        if item == 2:
            raise KeyboardInterrupt
        return item

    results = list(tp_runner.map(interrupt, range(4), n_workers=2, on_error="return", **options))
    assert isinstance(results.pop(2).__cause__, KeyboardInterrupt)
    assert results == [0, 1, 3]


@pytest.mark.timeout(300)
def test_a_start_that_fails_while_a_run_begins_ends_it(monkeypatch):
    may_fail = multiprocessing.get_context("fork").Event()

    def fail(device):
        may_fail.wait()
        raise OSError("no model here")

    def start_and_fail(fleet, may_restart):
        events = start(fleet, may_restart)
        may_fail.set()
        for handle in fleet._handles.values():
            assert handle.process.wait(200) is not None
        return [*events, *fleet.poll()]  # which reads what the workers said, and not yet their ends

    start = ProcessFleet.start
    monkeypatch.setattr(ProcessFleet, "start", start_and_fail)
    with pytest.raises(WorkerError, match="no model here"):
        list(tp_runner.map(lambda state, item: item, [1], n_workers=2, init=fail, start_method="fork"))


def test_failed_starts_leave_no_descriptor(run_script):
    out = run_script(
        """
        import os, resource
        import tp_runner

        def bad(device):
            raise OSError("no model here")

        def attempt():
            try:
                list(tp_runner.map(lambda s, x: x, [1], n_workers=3, init=bad, start_method="fork"))
            except (tp_runner.WorkerError, OSError) as error:
                return type(error).__name__

        counts = []
        for _ in range(3):
            kind = attempt()
            counts.append(len(os.listdir("/proc/self/fd")))
        print(kind, len(set(counts)))
        resource.setrlimit(resource.RLIMIT_NOFILE, (counts[0] + 12, 100))
        counts = []
        for _ in range(3):
            kind = attempt()
            counts.append(len(os.listdir("/proc/self/fd")))
        print(kind, len(set(counts)))
        """
    )
    assert out.splitlines() == ["WorkerError 1", "OSError 1"]


@pytest.mark.slow
def test_runners_that_start_themselves_are_refused_at_last():
    def deeper(n):
        return 1 + next(tp_runner.map(deeper, [n], n_workers=1, start_method="fork"))

    with pytest.raises(WorkerError, match="this runner would be started by a worker, by a worker") as caught:
        list(tp_runner.map(deeper, [0], n_workers=1, start_method="fork"))
    assert ConfigError.__name__ in str(caught.value)


# -- recycling ---------------------------------------------------------------------------------


@pytest.mark.parametrize("ordered", [True, False])
def test_a_worker_is_replaced_after_some_items(ordered):
    options = {"max_items_per_worker": 5, "ordered": ordered, "start_method": "fork"}
    pids = list(tp_runner.map(lambda _: os.getpid(), range(20), n_workers=1, **options))
    assert [pids.count(pid) for pid in dict.fromkeys(pids)] == [5, 5, 5, 5]


@pytest.mark.slow
def test_many_items_pass_through_workers_that_are_replaced():
    with OrderedRunner(2, max_items_per_worker=300, start_method="fork") as runner:
        assert list(runner.stream(range(5000))) == list(range(5000))
        assert sum(worker.deaths for worker in runner.stats().workers) == 0


def test_a_worker_that_leaves_ends_as_it_should(tmp_path):
    class Ends(OrderedRunner):
        @staticmethod
        def producer_end(device, cfg):
            (tmp_path / str(os.getpid())).touch()

    with Ends(1, max_items_per_worker=2, start_method="fork") as runner:
        assert list(runner.stream(range(6))) == list(range(6))
    assert len(list(tmp_path.iterdir())) in {3, 4}  # a fourth one may have been started


@pytest.mark.slow
def test_a_worker_with_too_much_memory_is_replaced():
    kept = []

    def leak(_):
        kept.append(bytearray(os.urandom(1 << 20)) * 32)
        time.sleep(0.11)
        return os.getpid()

    pids = list(
        tp_runner.map(leak, range(8), n_workers=1, max_memory_per_worker=128 << 20, start_method="fork")
    )
    assert 2 <= len(set(pids)) <= 4


def test_what_no_system_can_tell_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(_start, "_PROC", tmp_path)
    with pytest.raises(ConfigError, match=r"max_memory_per_worker=5 needs Linux's /proc.*max_items_per"):
        list(tp_runner.map(abs, [1], n_workers=1, start_method="fork", max_memory_per_worker=5))
