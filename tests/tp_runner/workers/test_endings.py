"""However a program ends, its workers end with it and leave nothing behind."""

import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from tests.own_words import own_words

PROGRAM = """
    import os, sys, time
    import tp_runner

    class Busy(tp_runner.UnorderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            if item < 50:
                return os.getpid(), bytes(100_000)
            {work}

    if __name__ == "__main__":
        runner = Busy(2, None, 1, start_method=sys.argv[1])
        pids = set()
        results = runner.stream(range(52))
        for _ in range(50):
            pids.add(next(results)[0])
        print(*pids, flush=True)
        print("ready", flush=True)
        next(results)
"""
SLEEP = "time.sleep(600)"
SPIN = "sum(range(10**10))"  # minutes in which the interpreter has no turn


@pytest.mark.parametrize(
    ("method", "number", "work"),
    [
        ("fork", signal.SIGKILL, SPIN),
        ("forkserver", signal.SIGKILL, SPIN),
        ("fork", signal.SIGTERM, SLEEP),
        ("forkserver", signal.SIGINT, SLEEP),
        pytest.param("spawn", signal.SIGKILL, SPIN, marks=pytest.mark.slow),
        pytest.param("spawn", signal.SIGTERM, SLEEP, marks=pytest.mark.nightly),
    ],
    ids=lambda value: getattr(value, "name", None) or str(value).partition("(")[0],
)
def test_workers_end_with_their_parent(start_script, is_running, wait_until, method, number, work):
    process = start_script(PROGRAM.format(work=work), method)
    pids = process.stdout.readline().split()
    assert pids
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.1)
    process.send_signal(number)
    process.wait(800)
    wait_until(lambda: not any(is_running(pid) for pid in pids))  # or a worker outlives its parent


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.nightly), "forkserver"])
def test_no_worker_is_left_by_a_parent_killed_at_any_moment(start_script, processes_of, wait_until, method):
    for delay_ms in (0, 5, 10, 20, 40, 80, 160, 320):
        process = start_script(
            """
            import sys
            import tp_runner

            if __name__ == "__main__":
                print("started", flush=True)
                while True:
                    with tp_runner.map(str, [1, 2], devices=2, start_method=sys.argv[1]) as results:
                        list(results)
            """,
            method,
        )
        assert process.stdout.readline() == "started\n"
        time.sleep(delay_ms / 1000)
        process.kill()
        process.wait(800)
        wait_until(lambda session=process.pid: not processes_of(session))


@pytest.mark.slow
def test_programs_that_workers_start_do_not_hide_their_death(start_script, is_running):
    process = start_script(
        """
        import os, sys, time
        import tp_runner

        class Starter(tp_runner.OrderedRunner):
            @staticmethod
            def producer_work(device, cfg, item):
                os.system("sleep 600 > /dev/null 2>&1 &")  # it inherits what can be inherited
                os._exit(7)

        if __name__ == "__main__":
            for method in ("spawn", "forkserver", "fork"):
                with tp_runner.UnorderedRunner(2, start_method=method), Starter(1, start_method=method) as r:
                    try:
                        list(r.stream([1]))
                    except tp_runner.WorkerDiedError as error:
                        print(error.exitcode, flush=True)
        """
    )
    out, err = process.communicate(timeout=800)
    assert out.splitlines() == ["7"] * 3, err


@pytest.mark.slow
def test_each_of_several_threads_notices_the_death_of_its_own_worker(run_script):
    out = run_script(
        """
        import os, threading
        import tp_runner

        class Mortal(tp_runner.OrderedRunner):
            @staticmethod
            def producer_work(device, cfg, item):
                os._exit(3)

        def one():
            for _ in range(10):
                with Mortal(2, start_method="fork") as runner:
                    try:
                        list(runner.stream([1]))
                    except tp_runner.WorkerDiedError as error:
                        codes.append(error.exitcode)

        codes = []
        threads = [threading.Thread(target=one) for _ in range(4)]
        [thread.start() for thread in threads]
        [thread.join() for thread in threads]
        print(len(codes), set(codes))
        """
    )
    assert out == "40 {3}\n"


def test_ctrl_c_in_the_terminal_reaches_the_program_once(start_script, is_running):
    process = start_script(
        """
        import os, signal, sys
        import tp_runner

        def work(item):
            return os.getpid()

        if __name__ == "__main__":
            with tp_runner.OrderedRunner(devices=2) as runner:
                try:
                    for n, _ in enumerate(runner.stream(iter(int, 1))):
                        if n == 100:
                            os.killpg(0, signal.SIGINT)
                except KeyboardInterrupt:
                    print("interrupted", flush=True)
                assert list(runner.stream(range(100))) == list(range(100))
                print("usable", flush=True)
        """
    )
    out, err = process.communicate(timeout=800)
    assert out.split() == ["interrupted", "usable"], err
    assert own_words(err) == ""


@pytest.mark.parametrize("method", ["forkserver", pytest.param("spawn", marks=pytest.mark.slow)])
def test_ctrl_c_while_workers_start_is_the_program_s_alone(start_script, tmp_path, monkeypatch, method):
    # What an interpreter runs before anything else: it waits in each one that workers have.
    at_start = """
import os, pathlib, time
if "AT_START" in os.environ:
    pathlib.Path(os.environ["AT_START"]).touch()
    time.sleep(1)
"""
    tmp_path.joinpath("sitecustomize.py").write_text(at_start)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    process = start_script(
        """
        import os, pathlib, signal, sys, threading, time
        import tp_runner

        def interrupt(mark):
            while not mark.exists():
                time.sleep(0.01)
            os.killpg(0, signal.SIGINT)

        if __name__ == "__main__":
            method, mark = sys.argv[1], pathlib.Path(sys.argv[2])
            threading.Thread(target=interrupt, args=[mark]).start()
            try:
                list(tp_runner.map(abs, [1], n_workers=1, start_method=method, env={"AT_START": str(mark)}))
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            print(list(tp_runner.map(abs, [-2], n_workers=1, start_method=method)), flush=True)
        """,
        method,
        tmp_path / "started",
    )
    out, err = process.communicate(timeout=800)
    assert out.splitlines() == ["interrupted", "[2]"], err
    assert own_words(err) == ""


def test_a_child_forked_by_the_program_does_not_keep_workers_alive(start_script, is_running, wait_until):
    process = start_script(
        """
        import os, time
        import tp_runner

        class Pids(tp_runner.OrderedRunner):
            @staticmethod
            def producer_work(device, cfg, item):
                return os.getpid()

        runner = Pids(devices=2)
        pids = set(runner.stream(range(50)))
        child = os.fork()
        if not child:
            os.close(1)
            os.close(2)
            time.sleep(600)
            os._exit(0)
        print(*pids, flush=True)
        time.sleep(600)
        """
    )
    pids = process.stdout.readline().split()
    process.kill()
    process.wait(800)
    wait_until(lambda: not any(is_running(pid) for pid in pids))  # or a worker outlives its parent


@pytest.mark.slow
def test_nothing_is_left_in_shared_memory(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(
        """
import os, signal
import numpy, torch
import tp_runner

def work(item):
    if item is None:
        os.kill(os.getpid(), signal.SIGKILL)
    return item + 1

for method in ("fork", "spawn", "forkserver"):
    for kind in (numpy.ones, torch.ones):
        assert len(list(tp_runner.map(work, [kind(100_000)] * 20, devices=2, start_method=method))) == 20
    try:
        list(tp_runner.map(work, [numpy.ones(100_000)] * 20 + [None], devices=2, start_method=method))
    except tp_runner.WorkerDiedError:
        print("died", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    # In a namespace of its own nobody else puts anything there.
    private = ["unshare", "--user", "--map-root-user", "--mount"]
    mount = "mount -t tmpfs tmpfs /dev/shm"
    if (
        shutil.which("unshare") is None
        or subprocess.run([*private, "sh", "-c", mount], check=False).returncode
    ):
        pytest.skip("this machine lets nobody have a mount namespace of his own")
    shell = f'{mount} && {{ "$0" "$1"; find /dev/shm -type f; }}'
    done = subprocess.run(
        [*private, "sh", "-c", shell, sys.executable, str(program)],
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )
    assert done.stdout.split() == ["died"] * 3, done.stderr


@pytest.mark.slow
def test_a_closed_runner_leaves_no_process_and_no_descriptor(run_script):
    out = run_script(
        """
        import gc, os
        import numpy
        import tp_runner

        def descriptors():
            return len(os.listdir("/proc/self/fd"))

        def once(method):
            arrays = (numpy.ones(100_000) for _ in range(50))
            for _ in tp_runner.map(numpy.negative, arrays, devices=2, start_method=method):
                pass

        for method in ("fork", "spawn", "forkserver"):
            once(method)
            gc.collect()
            before = descriptors()
            for _ in range(3):
                once(method)
            gc.collect()
            assert descriptors() <= before, method
        children = [int(n) for n in open(f"/proc/self/task/{os.getpid()}/children").read().split()]
        print(len(children))
        """
    )
    assert out.strip() == "1"  # the fork server, which serves the next runner


@pytest.mark.slow
def test_a_killed_fork_server_is_replaced(run_script):
    out = run_script(
        """
        import os, signal, time
        import tp_runner

        class Pids(tp_runner.OrderedRunner):
            @staticmethod
            def producer_work(device, cfg, item):
                if item == "slow":
                    time.sleep(600)
                return os.getppid(), os.getpid()

        if __name__ == "__main__":
            with Pids(1, timeout_s=15, max_restarts=1, on_error="return") as runner:
                [(server, worker)] = runner.stream([1])
                os.kill(server, signal.SIGKILL)
                [late] = runner.stream(["slow"])
                print(type(late).__name__)
                [(server_now, worker_now)] = runner.stream([1])
                print(server_now != server, worker_now != worker)
        """
    )
    assert out.split() == ["ItemTimeoutError", "True", "True"]
