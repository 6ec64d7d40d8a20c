"""Programs of public reports about pools of processes, where each hung, lost something or left something.

The table of most of them is in `tests/tp_runner/reported.py`; those that need more than a program are here.
"""

import re
import subprocess
import sys
import time
import zipfile

import pytest

from tests.own_words import own_words
from tests.tp_runner.reported import REPORTS

pytestmark = pytest.mark.slow

METHODS = ["forkserver", "spawn", "fork"]


@pytest.mark.parametrize("name", REPORTS)
def test_a_reported_program_is_right_and_leaves_no_process(name, processes_of, wait_until):
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.tp_runner.reported", name],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=800)
        assert (process.returncode, out, own_words(err)) == (0, "", ""), (REPORTS[name], out, err)
        wait_until(lambda: not processes_of(process.pid))
    finally:
        process.kill()  # where it hangs


def test_each_report_stands_once_in_the_table():
    places = [place for each in REPORTS.values() for place in each.place.split(", ")]
    assert all(re.fullmatch(r"[\w.-]+/[\w.-]+#\d+", place) for place in places)
    assert len(set(places)) == len(places)
    assert all(each.symptom for each in REPORTS.values())


def test_a_program_that_waits_for_every_child_takes_no_result_with_it(run_script):
    out = run_script(
        """
        import os, sys, threading, time
        import tp_runner

        def die(x):
            os._exit(7) if x == 3 else None

        def reap():
            while not is_over:
                try:
                    os.waitpid(-1, os.WNOHANG)
                except ChildProcessError:
                    pass
                time.sleep(0.001)

        if __name__ == "__main__":
            is_over = False
            reaper = threading.Thread(target=reap)
            reaper.start()
            for method in sys.argv[1:]:
                options = {"n_workers": 2, "start_method": method}
                print(sum(tp_runner.map(abs, range(100), **options)))
                try:
                    list(tp_runner.map(die, range(6), **options))
                except tp_runner.WorkerDiedError as error:
                    print(error.exitcode in {7, None})
            is_over = True
            reaper.join()
        """,
        *METHODS,
    )
    assert out.split() == ["4950", "True"] * 3


def test_a_fork_beside_a_thread_that_logs_all_the_time_does_not_hang(run_script):
    out = run_script(
        """
        import logging, threading, time
        import tp_runner

        class Slow(logging.Handler):
            def emit(self, record):
                time.sleep(0.05)

        log = logging.getLogger("slow")

        def work(x):
            log.warning("at work")
            return x

        if __name__ == "__main__":
            log.addHandler(Slow())
            log.propagate = False
            is_over = threading.Event()

            def noise():
                while not is_over.is_set():
                    log.warning("noise")

            thread = threading.Thread(target=noise)
            thread.start()
            for _ in range(5):
                print(list(tp_runner.map(work, range(3), n_workers=2, start_method="fork")))
            is_over.set()
            thread.join()
        """,
        timeout_s=100,
    )
    assert out.splitlines() == ["[0, 1, 2]"] * 5


OF_MAIN = """
import tp_runner

class Item:
    def __init__(self, value):
        self.value = value

def double(item):
    return Item(2 * item.value)

if __name__ == "__main__":
    for method in ("forkserver", "spawn", "fork"):
        found = list(tp_runner.map(double, [Item(i) for i in range(3)], n_workers=1, start_method=method))
        print([item.value for item in found], all(type(item) is Item for item in found))
"""


def test_however_a_program_is_named_and_its_streams_are_closed(tmp_path):
    script = tmp_path / "my script-ü.py"
    script.write_text(OF_MAIN)
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as file:
        file.writestr("__main__.py", OF_MAIN)
    right = "[0, 2, 4] True\n" * 3
    forms = {
        "from a pipe": (["-"], "", right),
        "isolated": (["-I", str(script)], "", right),
        "optimized": (["-O", str(script)], "", right),
        "a zip file": (["app.pyz"], "", right),
        "without a standard input": ([str(script)], "<&-", right),
        "without an output": ([str(script)], ">&-", ""),
        "without any": ([str(script)], "<&- >&- 2>&-", ""),
    }
    for form, (arguments, closed, expected) in forms.items():
        done = subprocess.run(
            ["sh", "-c", f'"$@" {closed}', "sh", sys.executable, *arguments],
            input=OF_MAIN if form == "from a pipe" else None,
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=800,
            check=False,
        )
        assert (done.returncode, done.stdout) == (0, expected), (form, done.stderr)
        assert not own_words(done.stderr), form


def test_deep_and_recursive_objects_arrive_or_are_errors_of_their_items(run_script):
    out = run_script(
        """
        import tp_runner

        class Node:
            def __init__(self):
                self.me = self

        def nested(n):
            found = []
            for _ in range(n):
                found = [found]
            return found

        def is_itself(node):
            return node.me is node

        if __name__ == "__main__":
            print(list(tp_runner.map(is_itself, [Node()], n_workers=1)))
            for item, work in ((nested(100_000), len), (100_000, nested)):
                (found,) = tp_runner.map(work, [item], n_workers=1, on_error="return")
                print(type(found).__name__)
        """
    )
    assert out.split() == ["[True]", "NotPicklableError", "NotPicklableError"]


def test_a_program_ends_with_everything_open_and_with_work_that_nobody_can_interrupt(run_script):
    out = run_script(
        """
        import re, signal, threading, time
        import tp_runner

        class Waits(tp_runner.OrderedRunner):
            @staticmethod
            def producer_work(device, cfg, seconds):
                time.sleep(seconds)
                return seconds

        def stubborn(x):
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, signal.SIG_IGN)
            if x == 1:
                re.match(r"(a+)+$", "a" * 40 + "b")  # years, in which the interpreter has no turn
            return x

        class Cycle:
            pass

        if __name__ == "__main__":
            found = tp_runner.map(stubborn, range(4), n_workers=2, timeout_s=1, on_error="return")
            print([type(each).__name__ for each in found])
            kept = Cycle()
            kept.kept, kept.runner, kept.executor = kept, Waits(n_workers=1), tp_runner.Executor(1)
            kept.stream = kept.runner.stream([0.01] * 10_000)
            kept.map = tp_runner.map(time.sleep, [0.01] * 10_000, n_workers=1)
            next(kept.stream), next(kept.map)
            kept.executor.submit(print, "done at the end", flush=True)
        """
    )
    assert out.splitlines() == ["['int', 'ItemTimeoutError', 'int', 'int']", "done at the end"]


def test_pools_of_every_kind_work_in_workers(run_script):
    out = run_script(
        """
        import concurrent.futures as futures, multiprocessing, subprocess, sys, warnings
        import tp_runner

        def of_multiprocessing(n):
            with multiprocessing.get_context("fork").Pool(2) as pool:
                return pool.map(abs, range(n))

        def of_processes(n):
            with futures.ProcessPoolExecutor(2, multiprocessing.get_context("forkserver")) as pool:
                return list(pool.map(abs, range(n)))

        def of_threads(n):
            with futures.ThreadPoolExecutor(2) as pool:
                return list(pool.map(abs, range(n)))

        def of_ours(n):
            with tp_runner.Executor(2) as pool:
                return list(pool.map(abs, range(n)))

        def of_a_manager(n):
            with multiprocessing.Manager() as manager:
                return list(manager.list(range(n)))

        def of_a_program(n):
            command = [sys.executable, "-c", f"print(*range({n}))"]
            return list(map(int, subprocess.check_output(command).split()))

        if __name__ == "__main__":
            warnings.simplefilter("ignore", DeprecationWarning)  # Python's, of forks beside threads
            works = [of_multiprocessing, of_processes, of_threads, of_ours, of_a_manager, of_a_program]
            with tp_runner.Executor(1) as executor:
                for work in works:
                    print(executor.submit(work, 3).result())
        """
    )
    assert out.splitlines() == ["[0, 1, 2]"] * 6


def test_results_of_views_and_of_arrays_that_the_work_writes_into_are_right(run_script):
    # Slices of memory maps were damaged (joblib/joblib#116); arrays came without a right to write into them
    # (joblib/joblib#1627); a program's own signal handler ran in its workers, which then went on
    # (SpaceCowMedia/commander-spellbook-backend#1204).
    out = run_script(
        """
        import signal, sys, tempfile
        import numpy as np
        import tp_runner

        def look(x):
            return x.sum(), x.shape

        def fill(x):
            x += 1
            return x

        def slow(x):
            import time
            time.sleep(0.01)
            return x

        if __name__ == "__main__":
            signal.signal(signal.SIGTERM, lambda *_: print("a worker has the program's handler"))
            file = tempfile.NamedTemporaryFile()
            mapped = np.memmap(file.name, dtype="float64", mode="w+", shape=(4, 60, 50, 3))
            mapped[:] = np.arange(mapped.size).reshape(mapped.shape)
            views = [mapped[i, :, :, c] for i in range(4) for c in range(3)]
            views += [mapped[:, 5], mapped[::2, ::-1], mapped[..., 1].T]
            zeros = [np.zeros(n) for n in (10, 100_000)]
            for method in sys.argv[1:]:
                options = {"n_workers": 2, "start_method": method}
                print(list(tp_runner.map(look, views, **options)) == list(map(look, views)))
                filled = list(tp_runner.map(fill, zeros, **options))
                filled[1][0] = 5
                print([x.sum() for x in filled] == [10, 100_004], any(x.any() for x in zeros))
                with tp_runner.map(slow, range(10_000), **options) as results:
                    next(results)
                try:
                    print(next(results))  # of a pool that has ended: it never came (python/cpython#79810)
                except (StopIteration, tp_runner.RunnerClosedError) as error:
                    print(type(error).__name__)
        """,
        *METHODS,
    )
    assert out.splitlines() == ["True", "True False", "StopIteration"] * 3


def test_futures_end_whatever_their_callbacks_and_their_workers_do(run_script):
    # All calls of a pool shared one error, or none came any more, once a worker had died
    # (python/cpython#101267, temporalio/sdk-python#245); an executor that was shut down in a callback raised
    # (python/cpython#131598), one that was collected called none (pyiron/executorlib#213), and cancelled
    # calls never ended (python/cpython#136655).
    out = run_script(
        """
        import concurrent.futures as futures, os, signal, threading
        import tp_runner

        def fail(n):
            if n == 2:
                raise ValueError(n)
            return n

        def raise_base(n):
            raise BaseException(n)

        if __name__ == "__main__":
            with tp_runner.Executor(1) as executor:
                died = [executor.submit(os._exit, 1) for _ in range(2)]
                first, second = (future.exception() for future in died)
                print(first is not second, isinstance(first, futures.process.BrokenProcessPool))
                print(executor.submit(abs, -1).result())
                pid = executor.submit(os.getpid).result()
                os.kill(pid, signal.SIGKILL)  # of one that waits for its next call (python/cpython#96062)
                print(executor.submit(abs, -2).result())
                print(type(executor.submit(raise_base, 3).exception()).__name__)  # python/cpython#101081
            executor, is_over = tp_runner.Executor(1), threading.Event()
            future = executor.submit(abs, -3)
            future.add_done_callback(lambda _: (executor.shutdown(wait=True), is_over.set()))
            print(is_over.wait(300))
            called = threading.Event()
            future = tp_runner.Executor(1).submit(abs, -4)
            future.add_done_callback(lambda _: called.set())
            print(future.result(), called.wait(300))
            ended = 0
            with tp_runner.Executor(2) as executor:
                calls = [executor.submit(fail, n) for n in range(100)]
                for future in futures.as_completed(calls, timeout=300):
                    ended += 1
                    if not future.cancelled() and future.exception() is not None:
                        executor.shutdown(wait=False, cancel_futures=True)
            print(ended)
        """
    )
    assert out.splitlines() == ["True True", "1", "2", "BaseException", "True", "4 True", "100"]


def test_workers_of_a_program_that_was_killed_end_with_it(start_script, is_running):
    # They stayed for ever (joblib/loky#360).
    process = start_script(
        """
        import os, signal, time
        import tp_runner

        if __name__ == "__main__":
            pids = []
            for method in ("forkserver", "spawn", "fork"):
                executor = tp_runner.Executor(1, start_method=method)
                pids.append(executor.submit(os.getpid).result())
                globals()[method] = executor, executor.submit(time.sleep, 0.5)
            print(*pids, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        """
    )
    pids = [int(pid) for pid in process.stdout.readline().split()]
    process.wait(800)
    deadline = time.monotonic() + 300
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline, pids
        time.sleep(0.05)
    assert len(pids) == 3
