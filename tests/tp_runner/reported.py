"""Programs of public reports about pools, and what happened there.

``python -m tests.tp_runner.reported NAME`` runs one.

Each hung, lost something, or left something in the library of its report. Here each ends, and checks its own
results; `tests/tp_runner/workers/test_reported_programs.py` runs them all, and looks for what they left. More
reports are named at the tests of that file.
"""

import collections
import concurrent.futures as futures
import enum
import gc
import itertools
import logging
import os
import signal
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tp_runner
from tp_runner import Executor, OrderedRunner, WorkerError


class Report(NamedTuple):
    """A report: where it is, what happened there, and its program."""

    place: str
    symptom: str
    program: Callable[[], None]


REPORTS: dict[str, Report] = {}


def report(place: str, symptom: str):
    """Enter a program in the table."""

    def enter(program):
        REPORTS[program.__name__] = Report(place, symptom, program)
        return program

    return enter


def check(found, expected):
    if found != expected:
        msg = f"expected {expected!r}, found {found!r}"
        raise SystemExit(msg)


def double(x):
    return 2 * x


def slow_double(x):
    time.sleep(0.005)
    return 2 * x


class Doubles(OrderedRunner):
    @staticmethod
    def producer_work(device, cfg, item):
        return 2 * item


# -- Ends -----------------------------------------------------------------------------------------


@report("uqfoundation/multiprocess#57", "results asked for after the block of the pool never came")
def after_the_block():
    with tp_runner.map(double, range(4), n_workers=2) as results:
        pass
    check(list(results), [])


@report("python/cpython#122930", "the second of two pools that nobody closed hung")
def pools_that_nobody_closes():
    class Part:
        def run(self, items):
            self.runner = Doubles(n_workers=1)
            return list(self.runner.stream(items))

    first, second = Part(), Part()
    doubled = first.run(range(2000))
    check(second.run(doubled), [4 * x for x in range(2000)])


@report("python/cpython#78178", "ending a pool in the midst of its work hung now and then")
def left_early():
    for _ in range(50):
        with tp_runner.map(double, itertools.count(), n_workers=2, start_method="fork") as results:
            check(next(results), 0)


@report("python/cpython#79659", "a result of a pool that had been ended was waited for for ever")
def results_of_a_pool_that_was_ended():
    executor = Executor(1)
    calls = [executor.submit(time.sleep, 0.3) for _ in range(5)]
    executor.shutdown(wait=False, cancel_futures=True)
    done, waiting = futures.wait(calls, timeout=300)
    check((len(done), len(waiting)), (5, 0))
    check(calls[-1].cancelled(), True)


@report("uqfoundation/pathos#266", "a program whose error was caught hung at its end, with an open pool")
def an_error_beside_an_open_pool():
    global OPEN  # noqa: PLW0603 - as people write it
    OPEN = Doubles(n_workers=2)
    check(list(OPEN.stream(range(3))), [0, 2, 4])
    try:
        raise ValueError(OPEN)
    except ValueError as error:
        globals()["ERROR"] = error  # with its frames


@report("joblib/joblib#1586", "the timeout had no effect on results as they come")
def a_timeout_of_results_as_they_come():
    found = tp_runner.map(time.sleep, [0, 500, 0], n_workers=1, ordered=False, timeout_s=1, on_error="return")
    check(sorted(type(each).__name__ for each in found), ["ItemTimeoutError", "NoneType", "NoneType"])


@report("python/cpython#146316", "the end waited for a forked child, which waited for the end")
def a_forked_child_that_waits_for_the_end():
    list(tp_runner.map(double, range(3), n_workers=2))
    reader, writer = os.pipe()
    if not os.fork():
        os.close(writer)
        os.read(reader, 1)  # until this program has ended
        os._exit(0)
    os.close(reader)


@report("python/cpython#140485", "a forked child that ended by itself printed a traceback")
def a_forked_child_that_ends_by_itself():
    results = tp_runner.map(double, range(1000), n_workers=2)
    next(results)
    pid = os.fork()
    if not pid:
        sys.exit()
    check(os.waitpid(pid, 0)[1], 0)
    check(sum(results), sum(map(double, range(1, 1000))))


# -- Workers --------------------------------------------------------------------------------------


def end_once(path):
    if path is not None and not path.exists():
        path.touch()
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(300)
    return os.getpid()


@report("openaddresses/machine#51", "a worker was ended by SIGTERM, and its task was lost")
def a_worker_that_was_asked_to_end():
    path = Path(tempfile.mkdtemp()) / "ended"
    items = [None, path, None, None]
    check(len(list(tp_runner.map(end_once, items, n_workers=1, max_restarts=1))), 4)
    path.unlink()
    path.parent.rmdir()


@report("danvk/mapsnap#191", "spawned workers with a state gave no results any more, and waited for items")
def spawned_workers_with_a_state():
    found = set()
    options = {"ordered": False, "init": str, "start_method": "spawn"}
    with tempfile.TemporaryFile("w") as file:
        for result in tp_runner.map(lambda device, x: (device, x), range(500), n_workers=2, **options):
            found.add(result)
            print(result, file=file, flush=True)
    check(found, {("cpu", x) for x in range(500)})


def fail_at_start(device):
    raise OSError(device)


@report("richardsheridan/trio-parallel#167", "a worker that failed at its start was waited for for ever")
def a_worker_that_fails_at_its_start():
    for _ in range(2):
        try:
            list(tp_runner.map(double, range(4), n_workers=2, init=fail_at_start))
        except WorkerError as error:
            check("OSError: cpu" in str(error), True)


@report("python/cpython#105464", "a pool of forks hung at its first call, once in some hundred")
def forks_beside_a_thread():
    is_over = threading.Event()
    thread = threading.Thread(target=lambda: [gc.collect() for _ in iter(is_over.is_set, True)])
    thread.start()
    for _ in range(20):
        with Executor(2, start_method="fork") as executor:
            check(executor.submit(double, 1).result(), 2)
    is_over.set()
    thread.join()


@report("celery/celery#496", "a worker that was to be replaced after its items was not")
def workers_that_are_replaced():
    found = tp_runner.map(double, range(50), n_workers=2, max_items_per_worker=2)
    check(list(found), [2 * x for x in range(50)])


def state_of_a_worker(device):
    return os.getpid()


@report("sybrenjansen/mpire#121", "workers lived on after the number of items that was given")
def a_worker_for_each_item():
    options = {"init": state_of_a_worker, "max_items_per_worker": 1}
    found = list(tp_runner.map(lambda pid, x: (pid == os.getpid(), pid), range(4), n_workers=1, **options))
    check([is_own for is_own, _ in found], [True] * 4)
    check(len({pid for _, pid in found}), 4)


# -- What travels ---------------------------------------------------------------------------------

ABC = type("ABC", (int,), {})


class Animal:
    legs = 4


renamed = type("Bird", (Animal,), {"legs": 2})


class Color(enum.Enum):
    RED = 1
    GREEN = 2


def name_of(x):
    return type(x).__name__, x + 1


@report("uqfoundation/pathos#156", "instances of a class that was made by type() could not be pickled")
def a_class_made_by_type():
    check(list(tp_runner.map(name_of, [ABC(5)] * 2, n_workers=1)), [("ABC", 6)] * 2)


def legs_of(x):
    return x.legs, isinstance(x, Animal) or issubclass(x, Animal)


@report("python/cpython#92920", "a class whose name is not that of its variable could not be pickled")
def a_class_of_another_name():
    check(list(tp_runner.map(legs_of, [Animal, renamed], n_workers=1)), [(4, True), (2, True)])
    check(list(tp_runner.map(legs_of, [renamed()], n_workers=1)), [(2, True)])


def make_animal(_):
    return Animal()


@report("uqfoundation/pathos#119", "results were of another class of the same name")
def results_of_a_class_of_the_script():
    for method in ("forkserver", "spawn", "fork"):
        (found,) = tp_runner.map(make_animal, [0], n_workers=1, start_method=method)
        check(isinstance(found, Animal), True)


def is_green(color):
    return color is Color.GREEN, Color.GREEN


@report("cloudpipe/cloudpickle#246, uqfoundation/multiprocess#49", "members of an enum were not themselves")
def members_of_an_enum():
    found = list(tp_runner.map(is_green, [Color.RED, Color.GREEN], n_workers=1))
    check([given for given, _ in found], [False, True])
    check(all(made is Color.GREEN for _, made in found), True)


def count_letters(text):
    pair = collections.namedtuple("pair", "letter number")  # noqa: PYI024 - as people write it
    return pair(text[0], len(text))


@report("pymc-devs/pymc#3268, lf1-io/padl#134", "named tuples of a function's body could not be pickled")
def named_tuples_of_a_function():
    (found,) = tp_runner.map(count_letters, ["abc"], n_workers=1)
    check((found.letter, found.number, type(found).__name__), ("a", 3, "pair"))


class Cubes:
    def __init__(self):
        self.cache = {}

    def compute(self, x):
        self.cache[x] = x**3
        return self.cache[x]


@report("uqfoundation/pathos#125", "the method of an object could not be pickled, or its object was changed")
def the_method_of_an_object():
    cubes = Cubes()
    check(list(tp_runner.map(cubes.compute, range(100), n_workers=2)), [x**3 for x in range(100)])
    check(cubes.cache, {})


def make_generator(x):
    return (each for each in range(x))


@report("langchain-ai/langchain#39229", "inputs that are generators were refused")
def generators():
    check(list(tp_runner.map(double, (x for x in range(3)), n_workers=1)), [0, 2, 4])
    (found,) = tp_runner.map(make_generator, [3], n_workers=1, on_error="return")
    check(type(found).__name__, "NotPicklableError")


# -- Order, and what belongs to whom --------------------------------------------------------------


@report("ray-project/ray#9318", "one pool in several threads: KeyError")
def one_runner_in_several_threads():
    with Doubles(n_workers=2) as runner, futures.ThreadPoolExecutor(4) as threads:
        found = threads.map(lambda n: list(runner.stream(range(n, n + 200))), range(0, 800, 200))
        check(list(itertools.chain(*found)), [2 * x for x in range(800)])


def slow_if_small(x):
    time.sleep(0.05 * (x < 2))
    return x


@report("ray-project/ray#34165", "results came in another order than their items")
def results_in_order():
    check(list(tp_runner.map(slow_if_small, range(60), n_workers=2)), list(range(60)))


@report("ray-project/ray#51979", "a result that was not there in time: UnboundLocalError")
def a_result_that_is_late():
    with Executor(1) as executor:
        call = executor.submit(slow_if_small, 1)
        try:
            call.result(timeout=0.001)
        except TimeoutError:
            check(call.result(timeout=300), 1)


@report("ray-project/ray#23107", "a map gave the result of a call that was submitted before it")
def a_map_beside_a_call():
    with Executor(2) as executor:
        call = executor.submit(slow_if_small, 0)
        check(list(executor.map(double, range(1, 6))), [2, 4, 6, 8, 10])
        check(call.result(), 0)


def fail_at_three(x):
    return 1 // (x - 3)


@report("ray-project/ray#22978", "one error of results as they come could not be caught without the others")
def one_error_of_many():
    found = tp_runner.map(fail_at_three, range(8), n_workers=2, ordered=False, on_error="return")
    names = collections.Counter(type(each).__name__ for each in found)
    check(dict(names), {"int": 7, "WorkerError": 1})


@report("ray-project/ray#29466", "finished results were kept back until the input gave another item")
def an_input_that_waits_for_results():
    have_come = threading.Event()

    def items():
        yield from range(3)
        have_come.wait()
        yield 3

    found = []
    for result in tp_runner.map(double, items(), n_workers=1):
        found.append(result)
        if len(found) == 3:
            have_come.set()
    check(found, [0, 2, 4, 6])


@report("agronholm/pythonfutures#39", "the whole input was read before the first result")
def a_long_input():
    n_read = 0

    def items():
        nonlocal n_read
        for n in range(100_000):
            n_read = n + 1
            yield n

    with tp_runner.map(slow_double, items(), n_workers=2) as results:
        check(next(results), 0)
    check(n_read < 10_000, True)


# -- Logs and warnings ----------------------------------------------------------------------------


class Records(logging.Handler):
    def __init__(self):
        super().__init__()
        self.found = []

    def emit(self, record):
        self.found.append(record.getMessage())


def say(x):
    logging.getLogger("reported").warning("at work on %d", x)
    return x


@report("joblib/joblib#634, joblib/joblib#1017", "loggers with handlers failed, or lost records")
def records_of_workers():
    records = Records()
    logging.getLogger().addHandler(records)
    list(tp_runner.map(say, range(10), n_workers=2))
    check(sorted(records.found), sorted(f"at work on {x}" for x in range(10)))


def warn(x):
    warnings.warn(f"a bad fit of {x}", stacklevel=1)
    return x


@report("sktime/sktime#10883, joblib/joblib#1591", "warnings of workers were lost")
def warnings_of_workers():
    records = Records()
    logging.getLogger("py.warnings").addHandler(records)
    logging.getLogger("py.warnings").propagate = False
    list(tp_runner.map(warn, [1], n_workers=1))
    check(["a bad fit of 1" in record for record in records.found], [True])


# -- What is left ---------------------------------------------------------------------------------


def children():
    """Return the states and the command lines of this process's children."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (path / "stat").read_text().rpartition(")")[2].split()[:2]
            if int(parent) == os.getpid():
                found.append((state, (path / "cmdline").read_bytes().decode()))
        except OSError:  # it has ended
            continue
    return found


@report("python/cpython#88887", "a process of the library's own was left as a zombie")
def no_zombies():
    for method in ("forkserver", "spawn", "fork"):
        list(tp_runner.map(double, range(4), n_workers=2, start_method=method))
    check([state for state, _ in children() if state == "Z"], [])


@report("ipython/ipyparallel#806, joblib/joblib#1153", "trackers of resources stayed for each pool")
def no_trackers():
    for _ in range(3):
        list(tp_runner.map(np.sum, [np.ones(100_000)] * 2, n_workers=2))
    commands = [command for _, command in children()]
    check(len(commands), 1)  # the fork server
    check("tracker" in commands[0], False)


class Detector:
    def __init__(self):
        self.runner = Doubles(n_workers=2, start_method="fork")

    def process(self, items):
        return list(self.runner.stream(items))


@report("CPJKU/madmom#505", "workers of objects that were forgotten stayed")
def workers_of_objects_that_are_forgotten():
    for _ in range(10):
        check(Detector().process([1, 2]), [2, 4])
    gc.collect()
    check(children(), [])


def sum_of(n):
    return sum(tp_runner.map(double, range(n), n_workers=2))


@report("joblib/loky#369", "pools within pools: leaked semaphores")
def pools_within_pools():
    check(list(tp_runner.map(sum_of, [3, 4], n_workers=2)), [6, 12])


def shared_maps():
    lines = Path("/proc/self/maps").read_text().splitlines()
    return sum("memfd" in line or "/dev/shm" in line for line in lines)


@report("scikit-learn/scikit-learn#30525", "shared memory grew with each call")
def shared_memory_of_many_calls():
    before = shared_maps()
    for _ in range(30):
        (found,) = tp_runner.map(double, [np.ones(1 << 17)], n_workers=1)
        check(found.sum(), 2 << 17)
        del found
    gc.collect()
    check(shared_maps(), before)


if __name__ == "__main__":
    REPORTS[sys.argv[1]].program()
