"""What a worker process shares with the program: its output, what is imported beforehand, how it ends."""

import atexit
import concurrent.futures
import contextvars
import decimal
import json
import multiprocessing
import os
import signal
import stat
import sys
import time
import warnings

import pytest
import tp_runner
from tp_core.errors import ConfigError
from tp_runner import (
    Executor,
    OrderedRunner,
    WorkerDiedError,
    _options,  # Windows cannot be had here, and the import says what is said there
)

from tests.tp_runner.registered import engine_of

METHODS = ["forkserver", "fork", pytest.param("spawn", marks=pytest.mark.slow)]


def _write(item):
    atexit.register(os.write, 1, b"at the end\n")
    os.write(1, f"item {item}\n".encode())


@pytest.mark.parametrize("method", METHODS)
def test_workers_write_where_their_runner_does_and_run_what_they_left_for_the_end(method, tmp_path):
    for name in ("first", "second"):  # one fork server is behind both
        before, file = os.dup(1), os.open(tmp_path / name, os.O_WRONLY | os.O_CREAT)
        os.dup2(file, 1)
        try:
            list(tp_runner.map(_write, [name], n_workers=1, start_method=method))
        finally:
            os.dup2(before, 1)
            os.close(before)
            os.close(file)
        assert sorted((tmp_path / name).read_text().split("\n")) == ["", "at the end", f"item {name}"]


def test_a_worker_ends_when_what_it_put_into_a_queue_is_written():
    queue = multiprocessing.get_context("fork").Queue()
    text = "x" * 1_000_000  # more than a pipe holds
    results = tp_runner.map(queue.put, [text], n_workers=1, start_method="fork")
    assert next(results) is None
    assert queue.get(timeout=800) == text
    results.close()


@pytest.mark.parametrize("method", METHODS)
def test_an_executor_that_a_worker_leaves_open_ends_with_it(method, is_running, wait_until):
    class LeavesOne(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, data):
            # Not by Python 3.14's fork server: a process forked from one that has it cannot start its own.
            context = multiprocessing.get_context("fork")
            cfg.executor = concurrent.futures.ProcessPoolExecutor(1, context)
            return cfg.executor.submit(os.getpid).result()

    runner = LeavesOne(1, start_method=method)
    (pid,) = runner.stream([0])
    runner.close(timeout_s=800)
    wait_until(lambda: not is_running(pid))


@pytest.mark.slow
def test_the_fork_server_imports_what_it_is_told_to(tmp_path, monkeypatch):
    (tmp_path / "heavy_import.py").write_text("import os\npid = os.getpid()\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def who_imported(_):
        import heavy_import

        return heavy_import.pid, os.getpid()

    with Executor(2, preload=["heavy_import"]) as executor:
        pairs = list(executor.map(who_imported, range(2)))
    assert len({imported for imported, _ in pairs}) == 1
    assert all(imported != own for imported, own in pairs)


def test_tracebacks_of_the_whole_chain_travel_where_tblib_is_installed():
    pytest.importorskip("tblib")

    def below(item):
        raise KeyError(item)

    def fails(item):
        try:
            below(item)
        except KeyError as error:
            raise ValueError("no") from error

    with pytest.raises(ValueError, match="no") as caught:
        list(tp_runner.map(fails, [1], n_workers=1, start_method="fork"))
    names = []
    for error in (caught.value.__cause__, caught.value.__cause__.__cause__):
        trace = error.__traceback__
        while trace is not None:
            names.append(trace.tb_frame.f_code.co_name)
            trace = trace.tb_next
    assert names == ["fails", "fails", "below"]


def test_windows_is_told_at_import_and_when_processes_are_asked_for(monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _options.warn_of_platform()  # nothing to say here
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.warns(RuntimeWarning, match="worker processes need Linux or macOS"):
        _options.warn_of_platform()
    monkeypatch.setitem(sys.modules, "fcntl", None)
    with pytest.raises(ConfigError, match="engine='thread'"):
        Executor(1, start_method="fork")


@pytest.mark.parametrize(
    ("platform", "options", "start_method"),
    [
        ("linux", {}, "forkserver"),
        ("darwin", {}, "spawn"),
        ("darwin", {"preload": ["json"]}, "forkserver"),
        ("darwin", {"start_method": "fork"}, "fork"),
    ],
)
def test_macos_spawns_unless_told_otherwise(monkeypatch, platform, options, start_method):
    monkeypatch.setattr(sys, "platform", platform)
    assert engine_of("process").make_settings(1, options).start_method == start_method


@pytest.mark.slow
def test_without_what_linux_alone_has_results_are_the_same(run_script):
    out = run_script(
        """
        import fcntl, os, select
        for module, name in ((os, "memfd_create"), (select, "epoll"), (fcntl, "F_SETSIG")):
            delattr(module, name)
        import numpy as np
        import tp_runner

        def double(array):
            return array * 2

        if __name__ == "__main__":
            for method in ("spawn", "fork"):
                arrays = [np.full(300_000, i) for i in range(5)]
                results = tp_runner.map(double, arrays, n_workers=2, start_method=method)
                print([int(array[-1]) for array in results])
            with tp_runner.Executor(1) as executor:
                print(type(executor.submit(os._exit, 3).exception()).__name__)
        """
    )
    assert out.splitlines() == ["[0, 2, 4, 6, 8]", "[0, 2, 4, 6, 8]", "WorkerDiedError"]


def test_an_executor_says_what_is_wrong_in_the_words_of_its_arguments():
    with pytest.raises(ValueError, match="max_workers must be greater than 0"):
        Executor(0)
    with Executor(1, engine="thread") as executor:
        with pytest.raises(ValueError, match="chunksize must be at least 1"):
            executor.map(abs, [1], chunksize=0)
        assert json.dumps(list(executor.map(abs, [-1], chunksize=5))) == "[1]"


# -- state of the process beside environment and folder ----------------------------------------


def _state(path):
    path.write_text("")
    return (
        time.strftime("%Z", time.localtime(0)),
        stat.S_IMODE(path.stat().st_mode),
        str(decimal.Decimal(1) / 3),
    )


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_time_zone_umask_and_decimal_context_are_those_of_the_program(method, tmp_path, monkeypatch):
    list(tp_runner.map(abs, [1], n_workers=1))  # a fork server exists from here on
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    time.tzset()
    mask = os.umask(0o077)
    try:
        with decimal.localcontext(prec=4):
            expected = _state(tmp_path / "own")
            assert expected == ("JST", 0o600, "0.3333")
            path = tmp_path / "of a worker"
            assert next(tp_runner.map(_state, [path], n_workers=1, start_method=method)) == expected
        zone = {"n_workers": 1, "start_method": method, "env": {"TZ": "America/New_York"}}
        assert next(tp_runner.map(_state, [path], **zone))[0] == "EST"
    finally:
        os.umask(mask)
        monkeypatch.undo()
        time.tzset()


@pytest.mark.slow
def test_text_has_one_hash_in_all_workers_of_a_program():
    found = set()
    for method in ("spawn", "forkserver"):
        options = {"n_workers": 2, "start_method": method, "queue_scale": 1}
        found.update(tp_runner.map(hash, ["text"] * 8, **options))
    assert len(found) == 1
    options = {"n_workers": 1, "start_method": "spawn", "env": {"PYTHONHASHSEED": "0"}}
    assert list(tp_runner.map(lambda _: sys.flags.hash_randomization, [0], **options)) == [0]


@pytest.mark.slow
def test_a_fork_is_safe_after_openmp_has_run(run_script):
    out = run_script(
        """
        import os
        os.environ["OMP_NUM_THREADS"] = "2"
        import torch, tp_runner

        def work(n):
            return (torch.ones(n, n) @ torch.ones(n, n)).sum().item()

        if __name__ == "__main__":
            torch.set_num_threads(2)
            expected = work(800)
            for threads in (None, 2):
                options = {"n_workers": 2, "start_method": "fork", "threads": threads}
                print(list(tp_runner.map(work, [800] * 3, **options)) == [expected] * 3)
            print(work(800) == expected)
        """,
        timeout_s=50,
    )
    assert out.split() == ["True"] * 3


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_an_exit_status_that_the_system_does_not_keep_is_none(method):
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        with pytest.raises(WorkerDiedError, match="this program ignores SIGCHLD") as caught:
            list(
                tp_runner.map(
                    lambda _: os.kill(os.getpid(), signal.SIGKILL), [1], n_workers=1, start_method=method
                )
            )
    finally:
        signal.signal(signal.SIGCHLD, before)
    assert caught.value.exitcode is None


def test_threads_have_the_context_of_the_caller():
    variable = contextvars.ContextVar("variable", default=0)
    variable.set(5)
    with decimal.localcontext(prec=4):
        work = lambda _: (variable.get(), str(decimal.Decimal(1) / 3))  # noqa: E731
        assert list(tp_runner.map(work, [0], n_workers=1, engine="thread")) == [(5, "0.3333")]


@pytest.mark.slow
def test_a_map_in_the_last_moments_of_python_says_so(run_script):
    out = run_script(
        """
        import tp_runner

        def work(x):
            return tp_runner  # a global: the search for copied generators looks at the work's instructions

        class AtTheEnd:
            def __del__(self, map=tp_runner.map, work=work, print=print):
                try:
                    list(map(work, [1], n_workers=2))
                except BaseException as error:
                    print(type(error).__name__, str(error).partition(";")[0])

        tp_runner.kept = AtTheEnd()
        """
    )
    assert out == "RunnerClosedError Python is ending, and starts no processes any more\n"


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"engine": "thread"}, {"start_method": "fork"}, {}])
def test_maps_of_daemon_threads_end_with_the_program_without_a_word(run_script, options):
    out = run_script(
        """
        import ast, itertools, sys, threading
        import tp_runner

        def read():
            for n, _ in enumerate(tp_runner.map(abs, itertools.count(), n_workers=2, **options)):
                if n == 50:
                    begun.release()

        if __name__ == "__main__":
            options, begun = ast.literal_eval(sys.argv[1]), threading.Semaphore(0)
            for _ in range(2):
                threading.Thread(target=read, daemon=True).start()
            for _ in range(2):
                begun.acquire()
            print("ends")
        """,
        options,
    )
    assert out == "ends\n"


@pytest.mark.parametrize("options", [{"engine": "inline"}, {"engine": "thread"}, {"start_method": "fork"}])
def test_the_input_may_use_the_runner_that_reads_it(options):
    class Increments(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            return item + 1

    with Increments(1, **options) as runner:
        assert list(runner.stream(result for result in runner.stream(range(5)))) == [2, 3, 4, 5, 6]
