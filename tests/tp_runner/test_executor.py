"""The Executor as concurrent.futures, asyncio and joblib use it."""

import asyncio
import concurrent.futures
import os
import pickle
import signal
import threading
import time
from concurrent.futures.process import BrokenProcessPool

import joblib
import numpy as np
import pytest
from tp_core.errors import ConfigError, DeviceError
from tp_runner import (
    Executor,
    RunnerClosedError,
    UnorderedRunner,
    WorkerDiedError,
    WorkerError,
    register_joblib,
)

ENGINES = [{"start_method": "fork"}, {"engine": "thread"}, {"engine": "inline"}]
IDS = ["process", "thread", "inline"]


@pytest.mark.parametrize("options", ENGINES, ids=IDS)
def test_any_function_is_called_with_its_arguments(options):
    with Executor(2, **options) as executor:
        assert executor.submit(int, "ff", base=16).result(800) == 255
        assert executor.submit(lambda x, y: x - y, 5, y=3).result(800) == 2


def test_map_takes_several_iterables_and_keeps_their_order():
    with Executor(2, start_method="fork") as executor:
        assert list(executor.map(pow, range(1000), [2] * 1000)) == [i * i for i in range(1000)]


def test_a_future_raises_what_the_function_raised():
    def fails(key):
        return {}[key]

    with Executor(1, start_method="fork") as executor:
        error = executor.submit(fails, "key").exception(800)
    assert type(error) is KeyError
    assert error.args == ("key",)
    assert isinstance(error.__cause__, WorkerError)
    assert "in fails" in error.__cause__.remote_traceback


def test_the_initializer_runs_in_each_worker_and_its_failure_is_raised():
    def prepare(name, value):
        os.environ[name] = value

    with Executor(2, start_method="fork", initializer=prepare, initargs=("TP_TEST", "7")) as executor:
        assert set(executor.map(os.getenv, ["TP_TEST"] * 50)) == {"7"}
    with pytest.raises(WorkerError, match="prepare"):
        Executor(1, start_method="fork", initializer=prepare)


def test_a_call_that_kills_its_worker_fails_alone():
    with Executor(1, start_method="fork") as executor:
        dead = executor.submit(os.kill, 0, 0)  # a harmless one first: the group's processes exist
        killer = executor.submit(lambda: os.kill(os.getpid(), signal.SIGKILL))
        others = [executor.submit(abs, -i) for i in range(20)]
        error = killer.exception(800)
        assert isinstance(error, WorkerDiedError)
        assert isinstance(error, BrokenProcessPool)
        assert error.exitcode == -signal.SIGKILL
        assert isinstance(pickle.loads(pickle.dumps(error)), BrokenProcessPool)
        assert dead.exception(800) is None
        assert [future.result(800) for future in others] == list(range(20))


def test_shutdown_finishes_what_was_submitted():
    executor = Executor(2, start_method="fork")
    futures = [executor.submit(time.sleep, 0.02) for _ in range(10)]
    executor.shutdown()
    assert all(future.done() for future in futures)
    with pytest.raises(RunnerClosedError):
        executor.submit(abs, 1)


def test_shutdown_without_waiting_finishes_later():
    executor = Executor(1, start_method="fork")
    future = executor.submit(time.sleep, 0.2)
    executor.shutdown(wait=False)
    with pytest.raises(RuntimeError):
        executor.submit(abs, 1)
    assert future.result(800) is None


def test_shutdown_can_cancel_what_has_not_begun():
    executor = Executor(1, engine="thread")
    hold = threading.Event()
    futures = [executor.submit(hold.wait, 800) for _ in range(100)]
    executor.shutdown(wait=False, cancel_futures=True)
    hold.set()
    concurrent.futures.wait(futures, 800)
    assert futures[0].result() is True
    assert futures[-1].cancelled()


@pytest.mark.parametrize("options", [{"engine": "thread"}, {"start_method": "fork"}], ids=["thread", "fork"])
def test_what_a_worker_can_take_is_not_cancelled(options):
    for _ in range(5):
        executor = Executor(1, **options)
        future = executor.submit(abs, -1)
        executor.shutdown(wait=False, cancel_futures=True)
        assert future.result() == 1


def test_no_future_is_given_out_where_workers_do_not_start_again(tmp_path):
    class Mortal(UnorderedRunner):
        @staticmethod
        def producer_init(device, cfg):
            if (tmp_path / "died").exists():
                raise OSError("no model here")

        @staticmethod
        def producer_work(device, cfg, item):
            (tmp_path / "died").touch()
            os._exit(3)

    with Mortal(1, start_method="fork") as runner:
        with pytest.raises(WorkerDiedError):
            runner.submit(1).result()
        for _ in range(3):
            with pytest.raises(WorkerError, match="no model here"):
                runner.submit(2).result(800)


def test_asyncio_uses_it():
    async def main(executor):
        loop = asyncio.get_running_loop()
        return await asyncio.gather(*(loop.run_in_executor(executor, pow, i, 2) for i in range(50)))

    with Executor(2, start_method="fork") as executor:
        assert asyncio.run(main(executor)) == [i * i for i in range(50)]


def test_results_are_not_kept_alive():
    with Executor(1, engine="thread") as executor:

        class Item:
            pass

        import weakref

        item = Item()
        reference = weakref.ref(item)
        assert executor.submit(lambda it: it is not None, item).result(800)
        del item
        deadline = time.monotonic() + 800
        while reference() is not None and time.monotonic() < deadline:
            time.sleep(0.01)
        assert reference() is None


def test_what_means_nothing_here_is_refused():
    with pytest.raises(ConfigError, match="an Executor has no use for batch=3"):
        Executor(1, batch=3)
    with pytest.raises(DeviceError, match="max_workers must be greater than 0, got 0"):
        Executor(0)


# -- joblib ------------------------------------------------------------------------------------


@pytest.fixture
def backend():
    register_joblib()
    with joblib.parallel_config("tp", n_jobs=2, start_method="fork"):
        yield


def test_joblib_runs_on_it(backend):
    results = joblib.Parallel()(joblib.delayed(np.multiply)(np.full(5000, i), 2) for i in range(50))
    assert [int(array[-1]) for array in results] == [2 * i for i in range(50)]


def test_joblib_gets_the_exception_of_the_function(backend):
    with pytest.raises(ZeroDivisionError):
        joblib.Parallel()(joblib.delayed(divmod)(1, i) for i in (1, 0, 2))


def test_joblib_results_come_as_a_generator(backend):
    results = joblib.Parallel(return_as="generator")(joblib.delayed(abs)(-i) for i in range(20))
    assert list(results) == list(range(20))


def test_joblib_hands_over_an_initializer_and_calls_a_single_worker_itself(backend):
    calls = [joblib.delayed(os.getenv)("MADE") for _ in range(4)]
    assert (
        joblib.Parallel(2, initializer=os.environ.update, initargs=({"MADE": "yes"},))(calls) == ["yes"] * 4
    )
    assert joblib.Parallel(1)([joblib.delayed(os.getpid)()]) == [os.getpid()]


def test_joblib_hands_over_the_options_of_a_single_call():
    register_joblib()
    parent = joblib.delayed(os.getppid)()
    assert joblib.Parallel(2, backend="tp", start_method="fork")([parent] * 2) == [os.getpid()] * 2
    with joblib.parallel_config("tp", n_jobs=2, start_method="spawn"):
        assert joblib.Parallel(start_method="fork")([parent] * 2) == [os.getpid()] * 2
    with pytest.raises(ConfigError, match="unknown option 'start_methods'"):
        joblib.Parallel(2, backend="tp", start_methods="fork")([parent] * 2)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_joblib_nests_it_by_name(method):
    def inner(n):
        return joblib.Parallel(2, backend="tp", start_method=method)(
            joblib.delayed(abs)(-i) for i in range(n)
        )

    register_joblib()
    assert joblib.Parallel(2, backend="tp")(joblib.delayed(inner)(n) for n in (1, 2)) == [[0], [0, 1]]


@pytest.mark.slow
def test_scikit_learn_fits_on_it(backend):
    from sklearn.datasets import load_iris
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.model_selection import cross_val_score

    x, y = load_iris(return_X_y=True)
    model = RandomForestClassifier(10, random_state=0)
    ours = cross_val_score(model, x, y, n_jobs=2)
    with joblib.parallel_config("sequential"):
        assert (cross_val_score(model, x, y) == ours).all()


def test_a_worker_that_cannot_start_again_is_not_started_for_ever(tmp_path):
    starts, broken = tmp_path / "starts", tmp_path / "broken"

    def prepare():
        with starts.open("a") as log:
            log.write("start\n")
        if broken.exists():
            os._exit(7)

    def break_and_die():
        broken.touch()
        os._exit(1)

    with Executor(1, start_method="fork", initializer=prepare) as executor:
        first = executor.submit(break_and_die).exception(800)
        assert isinstance(first, WorkerDiedError)
        assert "before it was ready: exit status 7" in str(first)
        with pytest.raises(WorkerDiedError, match="died: before it was ready: exit status 7"):
            executor.submit(abs, -1)
    assert len(starts.read_text().splitlines()) < 10
