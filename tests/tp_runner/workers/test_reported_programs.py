"""Programs of public reports about pools of processes, where each hung, lost something or left something."""

import subprocess
import sys
import zipfile

import pytest

from tests.own_words import own_words

pytestmark = pytest.mark.slow

METHODS = ["forkserver", "spawn", "fork"]


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
