"""Starts that fail beside other work; descriptors and messages at their limits: nothing hangs or mixes."""

import gc
import itertools
import logging
import multiprocessing
import os
import signal
import sys
import threading
import time
from pathlib import Path

import pytest
import tp_runner
from tp_runner import NotPicklableError, OrderedRunner, RunnerClosedError, WorkerError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it counts descriptors in /proc")

FORK = {"start_method": "fork"}
DEADLINE_S = 100.0


def n_descriptors():
    gc.collect()  # those of runners that other tests have left
    return len(list(Path("/proc/self/fd").iterdir()))


@pytest.fixture
def interrupt(monkeypatch):
    """Interrupt what this thread waits for, after some seconds."""

    def handle(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, handle)
    yield lambda seconds: signal.setitimer(signal.ITIMER_REAL, seconds)
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


# -- starts that fail --------------------------------------------------------------------------


class Holding(OrderedRunner):
    """Starts while there is no file "bad"; works on "hold" until there is none, on "hang" for long."""

    @staticmethod
    def producer_init(device, cfg):
        if (cfg.folder / "bad").exists():
            raise OSError("no model here")

    @staticmethod
    def producer_work(device, cfg, item):
        number = tp_runner.worker().number
        if item == "pid":
            time.sleep(0.02)
            return number, os.getpid()
        (cfg.folder / f"at work {number}").touch()
        deadline = time.monotonic() + DEADLINE_S
        while (item == "hang" or (cfg.folder / "bad").exists()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return item


def reading(runner, item):
    """Read the results of an item in a thread; return the thread, and where its result or error will be."""
    found = []

    def read():
        try:
            found.extend(runner.stream([item]))
        except WorkerError as error:
            found.append(error)

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    return thread, found


def test_a_start_that_fails_for_one_stream_ends_no_other_one_in_silence(tmp_path, wait_until, is_running):
    with Holding(2, {"folder": tmp_path}, **FORK) as runner:
        pids = {}
        while len(pids) < 2:
            pids.update(runner.stream(["pid"] * 8))
        (tmp_path / "bad").touch()
        thread, found = reading(runner, "hold")
        wait_until(lambda: list(tmp_path.glob("at work *")))
        (path,) = tmp_path.glob("at work *")
        idle = pids[1 - int(path.name[-1])]
        os.kill(idle, signal.SIGKILL)
        wait_until(lambda: not is_running(idle))
        with pytest.raises(WorkerError, match="no model here"):
            list(runner.stream(["pid"]))  # it starts the dead one again, and its failure stops both
        (tmp_path / "bad").unlink()
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
        assert found == ["hold"] or "no model here" in str(found[0])  # as the other thread is late or early


def test_a_start_that_fails_after_an_interrupt_reaches_every_stream(tmp_path, wait_until, interrupt):
    with Holding(2, {"folder": tmp_path}, **FORK) as runner:
        others = [reading(runner, "hang") for _ in range(2)]
        wait_until(lambda: len(list(tmp_path.glob("at work *"))) == 2)
        (tmp_path / "bad").touch()
        interrupt(0.1)
        with pytest.raises(KeyboardInterrupt):
            list(runner.stream(["hang"]))
        for thread, found in others:
            thread.join(DEADLINE_S)
            assert not thread.is_alive()
            assert "no model here" in str(found[0])


@pytest.mark.slow
def test_threads_that_were_left_behind_are_not_taken_for_their_successors(interrupt):
    numbers, may_end, left_behind = itertools.count(), threading.Event(), []

    class Starts(OrderedRunner):
        @staticmethod
        def producer_init(device, cfg):
            number = next(numbers)
            if number == 1:  # it is late, and then it raises
                left_behind.append(threading.current_thread())
                may_end.wait(DEADLINE_S)
                raise OSError("of the one before")
            if number == 2:
                may_end.set()
                left_behind[0].join(DEADLINE_S)

        @staticmethod
        def producer_work(device, cfg, item):
            time.sleep(item)
            return item

    with Starts(1, engine="thread", start_timeout_s=2.0) as runner:
        interrupt(0.1)
        with pytest.raises(KeyboardInterrupt):
            list(runner.stream([0.3]))
        with pytest.raises(WorkerError, match="was not ready after start_timeout_s"):
            list(runner.stream([0]))
        assert list(runner.stream([0])) == [0]


def test_an_interrupt_does_not_wait_for_threads_at_work(interrupt):
    may_end = threading.Event()

    class Waits(OrderedRunner):
        @staticmethod
        def producer_work(device, cfg, item):
            return may_end.wait(DEADLINE_S)

    with Waits(1, engine="thread") as runner:
        interrupt(0.1)
        with pytest.raises(KeyboardInterrupt):
            list(runner.stream([0]))
        may_end.set()
        assert list(runner.stream([0, 1])) == [True, True]


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_the_garbage_collector_works_in_workers(method):
    with tp_runner.map(lambda _: gc.isenabled(), [0], n_workers=1, start_method=method) as results:
        assert list(results) == [True]


def test_a_worker_that_does_not_read_its_setup_is_late_and_not_waited_for(tmp_path):
    (tmp_path / "sitecustomize.py").write_text("import time\ntime.sleep(600)\n")  # in a new interpreter
    env = {"PYTHONPATH": str(tmp_path), **{f"LONG_{n}": "x" * 50_000 for n in range(4)}}
    with pytest.raises(WorkerError, match="was not ready after start_timeout_s="):
        OrderedRunner(1, start_method="spawn", env=env, start_timeout_s=0.5)


def test_a_long_setup_arrives():
    env = {f"LONG_{n}": "x" * 50_000 for n in range(4)}
    options = {"n_workers": 1, "start_method": "spawn", "env": env}
    lengths = tp_runner.map(lambda name: len(os.environ[name]), list(env), **options)
    assert list(lengths) == [50_000] * 4


def test_workers_start_in_a_folder_that_is_gone(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    assert list(tp_runner.map(abs, [-1], n_workers=1)) == [1]  # no server starts in a folder that is gone
    (tmp_path / "gone").rmdir()
    assert list(tp_runner.map(abs, [-1], n_workers=1)) == [1]


def test_a_system_without_another_thread_is_an_error_and_the_runner_stays_usable(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with OrderedRunner(1, **FORK) as runner:
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                runner.submit(1)
            with pytest.raises(RuntimeError, match="can't start new thread"):
                list(runner.stream(iter(int, 1)))
        assert runner.submit(2).result(DEADLINE_S) == 2
        assert list(runner.stream(iter([3]))) == [3]


def test_times_that_mean_for_ever_are_possible():
    times = {"start_timeout_s": 1e10, "end_timeout_s": 1e10}
    for options in ({**FORK, **times, "timeout_s": 1e10}, {"engine": "thread", **times}):
        with OrderedRunner(1, **options) as runner:
            assert list(runner.stream(iter([1]))) == [1]


# -- descriptors -------------------------------------------------------------------------------


def test_an_input_that_goes_on_after_the_end_writes_to_no_file_of_the_program(tmp_path):
    gate = threading.Event()

    def items():
        yield from range(3)
        assert gate.wait(DEADLINE_S)
        yield 3

    def feeders():
        return {thread for thread in threading.enumerate() if thread.name == "tp-runner-feeder"}

    before = feeders()
    results = tp_runner.map(abs, items(), n_workers=1, **FORK)
    assert list(itertools.islice(results, 3)) == [0, 1, 2]
    (feeder,) = feeders() - before
    results.close()
    files = [(tmp_path / str(n)).open("wb") for n in range(40)]  # with the numbers that are free again
    try:
        gate.set()
        feeder.join(DEADLINE_S)
        assert {os.fstat(file.fileno()).st_size for file in files} == {0}
    finally:
        for file in files:
            file.close()


def test_a_program_with_thousands_of_files_starts_workers_and_hears_of_their_ends(run_script):
    out = run_script(
        """
        import os, resource, signal
        import tp_runner

        def die(_):
            os.kill(os.getpid(), signal.SIGKILL)

        if __name__ == "__main__":
            _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
            resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
            files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
            try:
                list(tp_runner.map(die, [1], n_workers=1))
            except tp_runner.WorkerDiedError as error:
                print(error.exitcode)
        """
    )
    assert out == "-9\n"


def test_a_program_that_cannot_travel_leaves_no_descriptor():
    queue = multiprocessing.get_context("forkserver").SimpleQueue()
    lock, before = threading.Lock(), n_descriptors()
    with pytest.raises(NotPicklableError):
        list(tp_runner.map(lambda _: (queue, lock), [1], n_workers=1))
    assert n_descriptors() <= before


def test_a_worker_that_ends_while_it_is_killed_is_no_error(monkeypatch):
    kill = os.kill

    def kill_late(pid, number):
        kill(pid, number)
        if number == signal.SIGKILL:
            raise ProcessLookupError(pid)

    before = n_descriptors()
    runner = OrderedRunner(2, **FORK)
    monkeypatch.setattr(os, "kill", kill_late)
    runner.stop()
    assert n_descriptors() <= before


def test_a_stream_of_a_stopped_runner_says_so(tmp_path):
    runner = Holding(1, {"folder": tmp_path}, **FORK)
    results = runner.stream(["pid", "hang", "hang"])
    next(results)
    runner.stop()
    with pytest.raises(RunnerClosedError, match="this runner was closed"):
        next(results)
    results.close()


# -- messages ----------------------------------------------------------------------------------


def test_a_record_in_the_midst_of_a_result_follows_it(caplog):
    def init(device):
        signal.signal(signal.SIGALRM, lambda *_: logging.getLogger("alarm").warning("now"))
        signal.setitimer(signal.ITIMER_REAL, 0.001, 0.001)

    def grow(state, item):
        return bytes([item]) * (100_000 << item)  # more than was expected: it goes through the pipe

    for n, data in enumerate(tp_runner.map(grow, range(8), init=init, n_workers=1, **FORK)):
        assert data == bytes([n]) * (100_000 << n)
        time.sleep(0.01)  # so that the worker waits in the middle of its next message
    assert {record.getMessage() for record in caplog.records} == {"now"}


class NeedsTwoError(Exception):
    def __init__(self, one, two):
        super().__init__(one)


def test_what_the_work_adds_to_a_log_record_cannot_end_the_worker(caplog):
    def work(item):
        extra = {"step": item, "problem": NeedsTwoError("first", 2)}  # which cannot be unpickled
        logging.getLogger("adds").warning("look", extra=extra)
        return item

    assert list(tp_runner.map(work, [7], n_workers=1, **FORK)) == [7]
    (record,) = [record for record in caplog.records if record.name == "adds"]
    assert (record.step, record.problem) == (7, "NeedsTwoError('first')")


STARTED_EARLY = """
import os, sys
import tp_runner

started = []
seen = set()  # how many processes had been started when the program was pickled
sys.addaudithook(lambda event, _: started.append(event) if event == "subprocess.Popen" else None)

class Witness:
    travels = False

    def __reduce__(self):
        seen.add(len(started))
        if not self.travels:
            raise ValueError("it stays here")
        return Witness, ()

    def __call__(self, item):
        import imported_once
        return imported_once.pid, os.getpid()

def run(**options):
    return list(tp_runner.map(Witness(), [1], n_workers=2, **options))

if __name__ == "__main__":
    method, folder = sys.argv[1:]
    try:
        run(start_method=method)
    except tp_runner.NotPicklableError:
        children = open(f"/proc/self/task/{os.getpid()}/children").read().split()
    Witness.travels = True
    sys.path.insert(0, folder)
    preload = None if method == "spawn" else ["imported_once"]
    [(importer, worker)] = run(start_method=method, preload=preload)
    print(len(children), importer == worker, children == [str(importer)], sorted(seen))
"""


@pytest.mark.parametrize(
    ("method", "words"), [("spawn", "0 True False [2, 4]"), ("forkserver", "1 False True [1]")]
)
def test_processes_start_while_the_program_is_pickled(method, words, run_script, tmp_path):
    (tmp_path / "imported_once.py").write_text("import os\npid = os.getpid()\n")
    assert run_script(STARTED_EARLY, method, str(tmp_path)).strip() == words
