"""Workers have the variables and the cores that they are given, before anything else happens there."""

import gc
import os
import signal
import sys

import pytest
import tp_runner
from tp_core.errors import ConfigError
from tp_core.launching import available_cores
from tp_runner import Executor, OrderedRunner, Pipeline

from tests.tp_runner.registered import engine_of

METHODS = ["forkserver", "fork", pytest.param("spawn", marks=pytest.mark.slow)]
HERE = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
pins = pytest.mark.skipif(not HERE, reason="the system pins nobody")


def settings_of(n_workers, options):
    return engine_of("process").make_settings(n_workers, options)


def _read(names):
    return [os.environ.get(name) for name in names]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.slow
def test_variables_are_set_and_removed_before_the_users_modules_are_imported(method, tmp_path, monkeypatch):
    (tmp_path / "reads_at_import.py").write_text(
        "import os\nCOLOR, SIZE = os.environ.get('COLOR'), os.environ.get('SIZE')\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("SIZE", "7")
    env = {"COLOR": "red", "SIZE": None}

    def init(device):
        import reads_at_import  # here, as a fork has what the program has imported

        return reads_at_import.COLOR, reads_at_import.SIZE

    def work(state, names):
        return state, _read(names)

    options = {"n_workers": 1, "init": init, "start_method": method, "env": env}
    assert list(tp_runner.map(work, [("COLOR", "SIZE")], **options)) == [(("red", None), ["red", None])]
    assert os.environ["SIZE"] == "7"
    assert "COLOR" not in os.environ


@pytest.mark.slow
def test_what_the_fork_server_imports_finds_them_and_others_servers_do_not(tmp_path, monkeypatch):
    (tmp_path / "imported_once.py").write_text("import os\nCOLOR = os.environ.get('COLOR')\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def seen(_):
        import imported_once

        return imported_once.COLOR

    options = {"n_workers": 1, "preload": ["imported_once"]}
    assert list(tp_runner.map(seen, [0], env={"COLOR": "red"}, **options)) == ["red"]
    assert list(tp_runner.map(seen, [0], **options)) == [None]


@pytest.mark.slow
def test_a_fork_server_with_an_environment_of_its_own_ends_with_its_workers(is_running, wait_until):
    class OfServer(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            return os.getppid()

    with OfServer(1, env={"COLOR": "blue"}) as runner:
        pid = runner.submit(1).result()
        assert is_running(pid)
    del runner

    def has_ended():
        gc.collect()
        return not is_running(pid)

    wait_until(has_ended)


@pytest.mark.slow
def test_servers_end_after_the_runners_that_a_program_forgets(start_script):
    process = start_script(
        """
        import tp_runner

        def give(future):
            print(f"{future.result()}\\n", end="", flush=True)  # in one piece: several threads print

        if __name__ == "__main__":
            runners = [tp_runner.OrderedRunner(1, env={"NUMBER": str(n)}) for n in range(4)]
            for n, runner in enumerate(runners):
                runner.submit(n).add_done_callback(give)
        """
    )
    out, err = process.communicate(timeout=800)
    assert sorted(out.split()) == ["0", "1", "2", "3"]
    assert not err


@pytest.mark.slow
def test_a_new_interpreter_starts_with_them():
    options = {"n_workers": 1, "start_method": "spawn", "env": {"PYTHONHASHSEED": "0"}}
    hashes = [next(tp_runner.map(hash, ["a word"], **options)) for _ in range(2)]
    assert hashes[0] == hashes[1]


def test_executors_and_pipelines_hand_them_on():
    options = {"env": {"COLOR": "green"}, "start_method": "fork"}
    with Executor(1, **options) as executor:
        assert executor.submit(_read, ["COLOR"]).result() == ["green"]
    with Pipeline(n_workers=1, **options).map(_read) as pipeline:
        assert list(pipeline.stream([["COLOR"]])) == [["green"]]


def test_threads_follow_the_variable():
    assert settings_of(1, {"env": {"OMP_NUM_THREADS": "3"}}).threads == 3
    settings = settings_of(1, {"env": {"OMP_NUM_THREADS": None}})
    assert settings.threads == available_cores()
    (seen,) = tp_runner.map(
        _read, [["OMP_NUM_THREADS"]], n_workers=1, start_method="fork", env={"OMP_NUM_THREADS": "3"}
    )
    assert seen == ["3"]


# -- cores -------------------------------------------------------------------------------------


@pins
@pytest.mark.parametrize("method", METHODS[1:])
def test_each_worker_is_on_its_cores_and_computes_with_as_many_threads(method, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)

    class Where(OrderedRunner):
        @staticmethod
        def producer_end(device, cfg):
            threads = sys.modules["torch"].get_num_threads() if "torch" in sys.modules else None
            return os.sched_getaffinity(0), os.environ["OMP_NUM_THREADS"], threads

    with Where(2, start_method=method, cpus=[set(HERE), HERE[-1]]) as runner:
        pass
    assert [cores for cores, _, _ in runner.exit_results] == [set(HERE), {HERE[-1]}]
    for cores, variable, threads in runner.exit_results:
        assert variable == str(len(cores))
        assert threads in {None, len(cores)}
    assert os.sched_getaffinity(0) == set(HERE)  # the program's own


@pins
def test_a_worker_that_is_started_again_has_the_same_cores():
    class Mortal(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            if item == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            return os.sched_getaffinity(0)

    with Mortal(1, cpus=[HERE[-1]], start_method="fork", max_restarts=9, on_error="return") as runner:
        assert list(runner.stream([0, "die", 1]))[::2] == [{HERE[-1]}] * 2


@pins
def test_threads_are_what_the_user_says_before_they_are_the_cores(monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert settings_of(1, {"cpus": "split"}).threads == 5
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert settings_of(1, {"cpus": "split", "threads": 4}).threads == 4
    assert settings_of(1, {"cpus": "split"}).threads is None  # as many as there are cores


def test_split_shares_the_cores_that_the_process_may_use_evenly(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {9, 4, 5, 7, 6}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda pid, cores: None, raising=False)
    assert settings_of(2, {"cpus": "split"}).cpus == ((4, 5), (6, 7, 9))
    assert settings_of(5, {"cpus": "split"}).cpus == ((4,), (5,), (6,), (7,), (9,))
    shared = settings_of(10, {"cpus": "split"}).cpus
    assert sorted(shared) == sorted([(4,), (5,), (6,), (7,), (9,)] * 2)


def test_a_system_that_pins_nobody_is_told(monkeypatch):
    monkeypatch.delattr(os, "sched_setaffinity", raising=False)
    with pytest.raises(ConfigError, match=r"cpus='split' pins workers to cores, which \w+ has no call for"):
        OrderedRunner(2, cpus="split")


# -- the fork server's socket ------------------------------------------------------------------


def test_a_copy_of_the_program_does_not_keep_its_fork_server_alive(start_script, is_running, wait_until):
    process = start_script(
        """
        import os, time
        import tp_runner

        class OfServer(tp_runner.OrderedRunner):
            @staticmethod
            def producer_work(device, cfg, item):
                return os.getppid()

        if __name__ == "__main__":
            runner = OfServer(1)
            server = runner.submit(1).result()
            child = os.fork()
            if not child:
                assert list(tp_runner.map(abs, [-1], n_workers=1)) == [1]  # from a server of its own
                print(server, os.getpid(), flush=True)
            time.sleep(600)
        """
    )
    server, child = map(int, process.stdout.readline().split())
    process.kill()
    process.wait(800)
    wait_until(lambda: not is_running(server))
    assert is_running(child)
